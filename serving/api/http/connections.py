"""Connections of the HTTP servers: how many there may be, and how long one may take for a request's head.

uvicorn accepts whatever comes and waits for it as long as it takes, so some hundred connections that send nothing would
take all file descriptors of the process: then nobody is answered any more, health checks included. Here connections
are accepted by ourselves. Where there are as many as are allowed, the one that has waited longest without ever sending
a request is closed for a newcomer, then any that is idle; only where all are at work is the newcomer turned away.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0  # from a connection, or a request's first byte, to the end of its head; and for a TLS handshake
IDLE_SECONDS = 75.0  # between requests; longer than proxies keep theirs, so that they are those who close
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 64  # then the event loop does something else
_PAUSE_SECONDS = 0.2  # where the process has no file descriptor left
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_NO_HTTP = (
    "This is no HTTP/1.1 request. gRPC has a port of its own (--grpc-port, 8001), and so has TLS or plain HTTP.\n"
)

Refused = Callable[[str], None]  # counts, by reason


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    total: int
    per_address: int | None = None  # None: no limit, because behind a proxy all clients have one address
    head_seconds: float = HEAD_SECONDS


@dataclass(eq=False, slots=True)
class _Open:
    """A connection that was accepted, until its socket is closed."""

    address: str
    socket: socket.socket
    protocol: Connection | None = None  # None during the TLS handshake

    @property
    def idle(self) -> bool:
        return self.protocol is None or self.protocol.awaits_head

    def close(self) -> None:
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()
        else:
            with suppress(OSError):  # ends the handshake, which then closes it
                self.socket.shutdown(socket.SHUT_RDWR)


class Connection(H11Protocol):
    """uvicorn's, with a limit of time for a request's head."""

    def __init__(self, listener: Listener, opened: _Open, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._listener = listener
        self._opened = opened
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened.protocol = self
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)
        self._listener.closed(self._opened)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unwatch()  # uvicorn's own timer runs until the next request begins
        if self.awaits_head and self.conn.trailing_data[0]:  # it has begun already
            self._unset_keepalive_if_required()
            self._watch()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(_NO_HTTP)

    def _watch(self) -> None:
        if not self.awaits_head:
            self._listener.sent_a_request(self._opened)
            self._unwatch()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._listener.limits.head_seconds, self._too_slow)

    def _unwatch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._listener.refused("too_slow")
            self.transport.write(_TOO_SLOW)
            self.transport.close()


class Listener:
    """Accepts connections within limits. Not thread-safe: it belongs to the event loop."""

    def __init__(
        self,
        listening: socket.socket,
        limits: ConnectionLimits,
        refused: Refused,
        tls: ssl.SSLContext | None,
        make: Callable[..., Connection],
    ) -> None:
        self.limits = limits
        self.refused = refused
        self._socket = listening
        self._tls = tls
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._fresh: dict[_Open, None] = {}  # have not sent a whole head yet; oldest first
        self._known: dict[_Open, None] = {}
        self._addresses: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        """Takes no new connections; those that are open stay."""
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def sent_a_request(self, opened: _Open) -> None:
        if opened in self._fresh:
            del self._fresh[opened]
            self._known[opened] = None

    def closed(self, opened: _Open) -> None:
        if opened in self._fresh or opened in self._known:
            self._fresh.pop(opened, None)
            self._known.pop(opened, None)
            self._addresses[opened.address] -= 1
            if not self._addresses[opened.address]:
                del self._addresses[opened.address]

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # most likely no file descriptor is left
                log.warning("no more connections for a moment: %s", error.strerror)
                self._close_an_idle_one()
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            self._take(accepted, address[0])

    def _take(self, accepted: socket.socket, address: str) -> None:
        per_address = self.limits.per_address
        if per_address is not None and self._addresses[address] >= per_address:
            log.warning("connections of %s are refused: it has %d", address, per_address)
            return self._turn_away(accepted)
        full = len(self._fresh) + len(self._known) >= self.limits.total
        if full and not self._close_an_idle_one():
            log.warning("connections are refused: there are %d, all at work", self.limits.total)
            return self._turn_away(accepted)
        accepted.setblocking(False)
        opened = _Open(address, accepted)
        self._fresh[opened] = None
        self._addresses[address] += 1
        task = self._loop.create_task(self._connect(opened))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _connect(self, opened: _Open) -> None:
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make, self, opened),
                opened.socket,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self.limits.head_seconds,
            )
        except OSError:  # the handshake failed, was too slow, or the connection was reset: its client's business
            opened.socket.close()
            self.closed(opened)

    def _close_an_idle_one(self) -> bool:
        """The oldest that never sent a request, else the oldest that waits for the next one."""
        found = next(iter(self._fresh), None) or next((each for each in self._known if each.idle), None)
        if found is None:
            return False
        log.warning("too many connections: those that send nothing are closed")
        self.refused("idle_connection")
        self.closed(found)  # now, because the newcomer takes its place
        found.close()
        return True

    def _turn_away(self, accepted: socket.socket) -> None:
        self.refused("connections")
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            if self._tls is None:
                accepted.send(_FULL)
