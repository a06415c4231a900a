"""Clients of HTTP that stop reading: their streams are given up, and their connections closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, MutableMapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from beamline.serving.api.guard import slow_reader

_LOOKS = 4  # at each connection, within the time limit
_STREAMS = "beamline.streams"  # in the scope of a request, while an `EventStream` answers it


class EventStream(StreamingResponse):
    """Server-sent events. Where one is not taken within some seconds, whoever makes them is given a `SlowReader`.

    Until then `close_stalled` leaves the connection alone: between two events nobody is kept waiting, however full its
    buffers are, and a connection that is closed first would make of a slow reader one that has left.
    """

    def __init__(self, events: AsyncGenerator[bytes], seconds: float | None, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalled = False

        async def patient(message: MutableMapping[str, Any]) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        scope[_STREAMS] = True
        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            if not stalled:
                raise
            await self._give_up(scope, receive)
        finally:
            scope[_STREAMS] = False

    async def _give_up(self, scope: Scope, receive: Receive) -> None:
        try:
            await self._events.athrow(slow_reader(self._seconds))
        finally:
            await self._events.aclose()
        scope[_STREAMS] = False
        while (await receive())["type"] != "http.disconnect":  # `close_stalled` sees to that
            pass


async def close_stalled(connections: Callable[[], Iterable[Any]], seconds: float) -> None:
    """For ever: closes what has been waiting for its reader for so long. `connections` are uvicorn's, over HTTP/1.1."""
    paused: dict[Any, int] = {}  # how many looks ago it began
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        waiting = [each for each in connections() if each.flow.write_paused]
        paused = {each: paused.get(each, 0) + 1 for each in waiting}
        for connection, looks in paused.items():
            if looks > _LOOKS and not _streams(connection):
                connection.transport.abort()  # what was not sent is lost


def _streams(connection: Any) -> bool:
    return connection.cycle is not None and connection.cycle.scope.get(_STREAMS, False)
