"""ModelStreamInfer: many requests on one stream, which run concurrently.

Responses come in the order of the requests, one for each. But a request with the parameter `stream` has many responses,
which are sent as soon as they are there (decoupled, as Triton calls it); the last of them, and only that, has
`triton_final_response`. An error is a response too, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.errors import SlowReader

_FINAL = "triton_final_response"
_MAX_CONCURRENT = 64  # requests of one stream; the next one is read when one of them is over


@dataclass(frozen=True, slots=True)
class Reply:
    response: oip.ModelInferResponse
    last: bool  # of its request
    in_order: bool  # sent after the responses to all earlier requests
    empty_final: bool = False  # an empty response follows the last one, and is the final one


Infer = Callable[[oip.ModelInferRequest], AsyncGenerator[Reply]]


class Stream:
    def __init__(self, infer: Infer, error_message: Callable[[Exception], str], context: Any) -> None:
        self._infer = infer
        self._error_message = error_message
        self._context = context
        self._write_lock = asyncio.Lock()
        self._free = asyncio.Semaphore(_MAX_CONCURRENT)

    async def run(self, requests: AsyncIterator[oip.ModelInferRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            previous: asyncio.Task[None] | None = None
            async for request in requests:
                await self._free.acquire()
                previous = group.create_task(self._respond(request, previous))
                del request  # the next one may be long in coming

    async def _respond(self, request: oip.ModelInferRequest, previous: asyncio.Task[None] | None) -> None:
        request_id = request.id
        try:
            try:
                async with aclosing(self._infer(request)) as replies:
                    async for reply in replies:
                        if reply.in_order:
                            await _finished(previous)
                        await self._write(reply)
                return
            except SlowReader:  # of the stream: nobody would read the error either
                raise
            except Exception as error:
                message = self._error_message(error)
                clear_frames(error.__traceback__)  # which hold the request, too
            # It counts as pending no longer, so it must not stay in memory while the error waits for its turn.
            del request
            await _finished(previous)
            failed = oip.ModelInferResponse(id=request_id)
            failed.parameters[_FINAL].bool_param = True
            reply_of_error = oip.ModelStreamInferResponse(error_message=message, infer_response=failed)
            async with self._write_lock:
                await self._context.write(reply_of_error)
        finally:
            self._free.release()

    async def _write(self, reply: Reply) -> None:
        response, last = reply.response, reply.last
        empty = last and reply.empty_final
        response.parameters[_FINAL].bool_param = last and not empty
        async with self._write_lock:
            await self._context.write(oip.ModelStreamInferResponse(infer_response=response))
            if empty:
                final = oip.ModelInferResponse(
                    model_name=response.model_name, model_version=response.model_version, id=response.id
                )
                final.parameters[_FINAL].bool_param = True
                await self._context.write(oip.ModelStreamInferResponse(infer_response=final))


async def _finished(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait([task])
