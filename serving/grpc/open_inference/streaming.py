"""ModelStreamInfer: many requests on one stream, answered side by side.

Answers come in the order of the requests, each in one response; but a request with the parameter `stream` gets a
response for each of its texts as soon as it is there (decoupled, as Triton calls it), and its last one, and only that,
says `triton_final_response`. An error is a response too, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from protos import open_inference_pb2 as oip
from serving.grpc.open_inference.infer import Question, read_question

_FINAL = "triton_final_response"
_SMALL = 32 * 1024  # bytes
_MOST_AT_ONCE = 64  # requests of one stream; the client waits beyond

Infer = Callable[[Question, Any], Awaitable[oip.ModelInferResponse]]


async def read(request: oip.ModelInferRequest) -> Question:
    """A large one in a thread: taking it apart would keep the event loop from others."""
    if request.ByteSize() > _SMALL:
        return await asyncio.to_thread(read_question, request)
    return read_question(request)


class Stream:
    def __init__(self, infer: Infer, sentence: Callable[[Exception], str], context: Any) -> None:
        self._infer = infer
        self._sentence = sentence
        self._context = context
        self._writing = asyncio.Lock()
        self._free = asyncio.Semaphore(_MOST_AT_ONCE)

    async def run(self, requests: AsyncIterator[oip.ModelInferRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            before: asyncio.Task[None] | None = None
            async for request in requests:
                await self._free.acquire()
                before = group.create_task(self._answer(request, before))

    async def _answer(self, request: oip.ModelInferRequest, before: asyncio.Task[None] | None) -> None:
        try:
            question = await read(request)
            if question.parameters.stream:
                await self._decoupled(question)
            else:
                response = await self._infer(question, self._context)
                await _over(before)
                await self._write(response, question, last=True)
        except Exception as error:
            await _over(before)
            failed = oip.ModelInferResponse(id=request.id)
            failed.parameters[_FINAL].bool_param = True
            reply = oip.ModelStreamInferResponse(error_message=self._sentence(error), infer_response=failed)
            async with self._writing:
                await self._context.write(reply)
        finally:
            self._free.release()

    async def _decoupled(self, question: Question) -> None:
        singles = [replace(question, request=request) for request in question.of_each_input()]
        if not singles:  # let the model say what is wrong with that
            await self._infer(question, self._context)
        left = len(singles)

        async def one(number: int, single: Question) -> None:
            nonlocal left
            response = await self._infer(single, self._context)
            response.parameters["index"].int64_param = number
            left -= 1
            await self._write(response, question, last=not left)

        try:
            async with asyncio.TaskGroup() as group:
                for number, single in enumerate(singles):
                    group.create_task(one(number, single))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _write(self, response: oip.ModelInferResponse, question: Question, last: bool) -> None:
        """Where the client wants an empty final response, the last one with content is not final."""
        empty = last and question.parameters.empty_final and question.parameters.stream
        response.parameters[_FINAL].bool_param = last and not empty
        async with self._writing:
            await self._context.write(oip.ModelStreamInferResponse(infer_response=response))
            if empty:
                final = oip.ModelInferResponse(
                    model_name=response.model_name, model_version=response.model_version, id=response.id
                )
                final.parameters[_FINAL].bool_param = True
                await self._context.write(oip.ModelStreamInferResponse(infer_response=final))


async def _over(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait([task])
