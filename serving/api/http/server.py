"""The HTTP server: uvicorn in the event loop of the whole server, which handles signals itself: it drains first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from beamline.serving.api.http.connections import IDLE_SECONDS, Connection, ConnectionLimits, Listener, Refused
from beamline.serving.api.http.stalled import close_stalled
from beamline.serving.errors import BeamlineError
from beamline.serving.security.tls import ServerTls

_GRACE_SECONDS = 1.0  # for requests to notice that their connection is closed, and then that they are cancelled
_POLL_SECONDS = 0.1
_DEFAULT_LIMITS = ConnectionLimits(total=256)


class _Uvicorn(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, bound: socket.socket, limits: ConnectionLimits, refused: Refused
    ) -> None:
        super().__init__(config)
        config.load()
        self.listening = asyncio.Event()
        self.listener = Listener(bound, limits, refused, config.ssl, self.connection)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.listener.start()
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.listener.close()
        await super().shutdown([])

    def connection(self, listener: Listener, opened: Any) -> Connection:
        return Connection(
            listener, opened, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def disconnect(self) -> None:
        """All connections at once; what was not sent yet is lost."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class HttpServer:
    """Bound at construction, as the gRPC server is."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ServerTls | None = None,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
        refused: Refused = lambda reason: None,
        write_seconds: float | None = None,
        option: str = "--http-port",
    ) -> None:
        """`write_seconds`: how long the reader of a response may take nothing."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            what = option.removeprefix("--").replace("-", " ")
            raise BeamlineError(
                f"the {what} can't listen on {host}:{port}: {error.strerror}: choose another {option} "
                "(0: any free one) or --host"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._tls = tls
        self._limits = limits
        self._refused = refused
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._write_seconds = write_seconds
        self._closing: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            ssl_context_factory=None if (tls := self._tls) is None else lambda config, default: tls.http_context(),
        )
        self._uvicorn = _Uvicorn(config, self._socket, self._limits, self._refused)
        self._task = asyncio.create_task(self._uvicorn.serve())
        if self._write_seconds is not None:
            state = self._uvicorn.server_state
            self._closing = asyncio.create_task(close_stalled(lambda: list(state.connections), self._write_seconds))
        await self._uvicorn.listening.wait()

    async def finish(self) -> None:
        """Takes no new connections, and returns when all responses are sent, however slow their readers are."""
        if self._uvicorn is not None and self._task is not None:
            self._uvicorn.should_exit = True
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Closes all connections at once, and cancels their requests."""
        if self._closing is not None:
            self._closing.cancel()
        if self._uvicorn is not None and self._task is not None:
            await self._stop(self._uvicorn, self._task)
        self._socket.close()

    async def _stop(self, uvicorn: _Uvicorn, serving: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        uvicorn.should_exit = uvicorn.force_exit = True
        grace_ends = loop.time() + _GRACE_SECONDS
        while True:  # clients may still connect until uvicorn polls `should_exit`
            uvicorn.disconnect()
            _, busy = await asyncio.wait({serving, *uvicorn.server_state.tasks}, timeout=_POLL_SECONDS)
            if not (busy or uvicorn.server_state.connections) or loop.time() >= grace_ends:
                break
        for task in busy:
            task.cancel()
        if busy:
            await asyncio.wait(busy, timeout=_GRACE_SECONDS)
