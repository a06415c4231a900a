"""Clients of HTTP that stop reading: their streams are given up, and their connections closed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, MutableMapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from beamline.serving.api.guard import slow_reader

_LOOKS = 4  # at each connection, within the time limit
_STREAM = "beamline.stream"  # in the scope of a request: the `EventStream` that answers it
_BYTES_ACKED = 120  # where Linux has it in struct tcp_info


class EventStream(StreamingResponse):
    """Server-sent events. Where its connection has stalled and one is to be sent, whoever makes them is given a
    `SlowReader`. Until then the connection stays: between two events nobody is kept waiting, and if it were closed, a
    slow reader would be taken for one that has left."""

    def __init__(self, events: AsyncGenerator[bytes], seconds: float | None, headers: dict[str, str]) -> None:
        """`events` have begun, so that they notice how it ends, however soon."""
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._seconds = seconds
        self._sending: asyncio.Timeout | None = None
        self._stalled = False
        self.given_up = False

    def connection_stalled(self) -> None:
        """Gives up the event that is being sent, where there is one. May be said again and again."""
        if self._sending is not None and self._sending.when() is None:
            self._sending.reschedule(asyncio.get_running_loop().time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: MutableMapping[str, Any]) -> None:
            try:
                async with asyncio.timeout(None) as self._sending:
                    await send(message)
            except TimeoutError:
                self._stalled = True
                raise
            finally:
                self._sending = None

        scope[_STREAM] = self
        try:
            await super().__call__(scope, receive, sent)
        except TimeoutError:
            if not self._stalled:
                raise
            await self._give_up(receive)
        finally:
            scope[_STREAM] = None
            await self._events.aclose()

    async def _give_up(self, receive: Receive) -> None:
        await self._events.athrow(slow_reader(self._seconds))
        await self._events.aclose()
        self.given_up = True
        while (await receive())["type"] != "http.disconnect":  # `close_stalled` sees to that
            pass


async def close_stalled(connections: Callable[[], Iterable[Any]], seconds: float) -> None:
    """For ever: closes those of which nothing was taken for so long, though there was something to be sent.
    `connections` are uvicorn's, of HTTP/1.1."""
    stalled: dict[Any, tuple[tuple[int, int], int]] = {}  # what was taken at the last look; since how many
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        before, stalled = stalled, {}
        for connection in connections():
            stream = connection.cycle and connection.cycle.scope.get(_STREAM)
            if stream is not None and stream.given_up:
                connection.transport.abort()  # what was not sent is lost
            elif connection.flow.write_paused:
                taken, looks = _taken(connection.transport), 0
                if taken is None:
                    continue
                if connection in before and taken == before[connection][0]:
                    looks = before[connection][1] + 1
                stalled[connection] = taken, looks
                if looks < _LOOKS:
                    continue
                if stream is not None:
                    stream.connection_stalled()
                else:
                    connection.transport.abort()


def _taken(transport: asyncio.WriteTransport) -> tuple[int, int] | None:
    """Changes when something is taken: how many bytes of its connection's have arrived, and how many wait in its
    buffer. The buffer alone would not tell: it is filled again, and TLS has its own. But a sandbox that plays the
    kernel (gVisor) may count no arrivals. None: it is being closed already."""
    try:
        connection, waiting = transport.get_extra_info("socket"), transport.get_write_buffer_size()
    except AttributeError:  # asyncio's transport for TLS has none of its parts any more when it was closed twice
        return None
    if connection is None:
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    (arrived,) = struct.unpack_from("Q", info.ljust(_BYTES_ACKED + 8, b"\0"), _BYTES_ACKED)
    return arrived, waiting
