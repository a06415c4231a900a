"""What a stream of requests keeps in memory."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.streaming import Reply, Stream
from beamline.serving.errors import InvalidRequest


class RequestDouble:
    def __init__(self, id: str) -> None:
        self.id = id


class ContextDouble:
    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, response: Any) -> None:
        self.written.append(response)


async def test_a_refused_request_is_dropped_while_its_error_waits_for_its_turn() -> None:
    kept: dict[str, weakref.ref[RequestDouble]] = {}
    context, refused, let_go = ContextDouble(), asyncio.Event(), asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        for id in ("first", "refused"):
            request = RequestDouble(id)
            kept[id] = weakref.ref(request)
            yield request
            del request
        await let_go.wait()

    async def check(request: Any) -> None:
        checked = request  # as code below a method does
        raise InvalidRequest(f"{checked.id}: no")

    async def infer(request: Any) -> AsyncGenerator[Reply]:
        if request.id == "refused":
            try:
                await check(request)
            except InvalidRequest as error:
                # A group that holds the error that it is the context of: only the collector would find the two.
                raise error from ExceptionGroup("several", [error])
        await let_go.wait()
        yield Reply(oip.ModelInferResponse(id=request.id), last=True, in_order=True)

    def error_message(error: Exception) -> str:
        refused.set()
        return str(error)

    running = asyncio.ensure_future(Stream(infer, error_message, context).run(requests()))
    await refused.wait()
    assert kept["first"]() is not None
    assert kept["refused"]() is None
    let_go.set()
    await running
    answers = [(each.error_message, each.infer_response.id) for each in context.written]
    assert answers == [("", "first"), ("refused: no", "refused")]
