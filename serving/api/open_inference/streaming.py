"""ModelStreamInfer: many requests on one stream, answered side by side.

Answers come in the order of the requests, each in one response; but a request with the parameter `stream` is answered
as it comes, in many responses (decoupled, as Triton calls it), and its last one, and only that, says
`triton_final_response`. An error is a response too, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.tasks import Piece

_FINAL = "triton_final_response"
_MOST_AT_ONCE = 64  # requests of one stream; the client waits beyond


@dataclass(frozen=True, slots=True)
class Reply:
    piece: Piece
    in_order: bool  # behind the answers to the requests before it
    empty_final: bool  # an empty response shall follow the last one, and be the final one


Infer = Callable[[oip.ModelInferRequest, Any], AsyncGenerator[Reply]]


class Stream:
    def __init__(self, infer: Infer, error_message: Callable[[Exception], str], context: Any) -> None:
        self._infer = infer
        self._error_message = error_message
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
            async with aclosing(self._infer(request, self._context)) as replies:
                async for reply in replies:
                    if reply.in_order:
                        await _over(before)
                    await self._write(reply)
        except Exception as error:
            await _over(before)
            failed = oip.ModelInferResponse(id=request.id)
            failed.parameters[_FINAL].bool_param = True
            reply_of_error = oip.ModelStreamInferResponse(
                error_message=self._error_message(error), infer_response=failed
            )
            async with self._writing:
                await self._context.write(reply_of_error)
        finally:
            self._free.release()

    async def _write(self, reply: Reply) -> None:
        response, last = reply.piece.response, reply.piece.last
        empty = last and reply.empty_final
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
