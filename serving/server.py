"""The composition root: builds a server from a `ServeConfig`, starts, drains and stops it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from beamline.serving.api.descriptors import share_descriptors
from beamline.serving.api.grpc.server import GrpcServer
from beamline.serving.api.http.connections import ConnectionLimits
from beamline.serving.api.http.framing import Framing
from beamline.serving.api.http.server import HttpServer
from beamline.serving.config import ServeConfig
from beamline.serving.lifecycle import Lifecycle, Phase
from beamline.serving.models.loader import EngineMakers
from beamline.serving.models.manager import ModelManager
from beamline.serving.security.tls import ServerTls
from beamline.serving.service import Service
from beamline.serving.telemetry.metrics import Metrics

_REFUSAL_SECONDS = 2.0


class Server:
    """A service behind ports. Must be constructed inside the event loop that runs it."""

    def __init__(self, config: ServeConfig, makers: EngineMakers | None = None) -> None:
        self.config = config
        self.service = Service(config, makers)
        self._metrics_http: HttpServer | None = None
        self._gateway: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._overdue = False  # a drain was cut short

    @property
    def lifecycle(self) -> Lifecycle:
        return self.service.lifecycle

    @property
    def metrics(self) -> Metrics:
        return self.service.metrics

    @property
    def manager(self) -> ModelManager | None:
        """From `start` on."""
        return self.service.manager

    @property
    def failed(self) -> asyncio.Event:
        """Set when engines don't step any more: the process has to end."""
        return self.service.failed

    @property
    def grpc_address(self) -> str:
        assert self._grpc is not None, "the server was not started"
        return _address(self.config.host, self._grpc.port)

    @property
    def metrics_address(self) -> str:
        assert self._metrics_http is not None, "the server was not started"
        return _address(self.config.host, self._metrics_http.port)

    @property
    def http_address(self) -> str | None:
        return None if self._gateway is None else _address(self.config.host, self._gateway.port)

    async def start(self) -> None:
        """Returns when every model is loaded and calls are answered. HTTP answers earlier, for health checks."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config, service = self.config, self.service
        guard = service.guard
        tls = None if config.tls is None else ServerTls(config.tls)
        write_seconds = config.write_seconds
        connections = share_descriptors(config.max_connections)
        limits = ConnectionLimits(connections.operators)
        self._metrics_http = HttpServer(
            config.host,
            config.metrics_port,
            None,
            limits,
            guard.count_refusal,
            write_seconds,
            option="--metrics-port",
        )
        self._grpc = GrpcServer(
            config.host,
            config.grpc_port,
            config.max_message_bytes,
            guard,
            tls,
            connections.grpc,
            config.keepalive_seconds,
            service.workers.check,
            config.max_connection_seconds,
            write_seconds,
        )
        service.when_failed = self._grpc.report_not_serving
        if config.http_port is not None:
            limits = ConnectionLimits(connections.gateway, config.max_connections_per_address)
            self._gateway = HttpServer(config.host, config.http_port, tls, limits, guard.count_refusal, write_seconds)
        await self._metrics_http.start(Framing(service.operations_app(), self.lifecycle, guard.count_refusal))
        service.start_engines()
        if self._gateway is not None:
            app = service.gateway_app(service.operating_routes())
            await self._gateway.start(Framing(app, self.lifecycle, guard.count_refusal))
        manager = await service.load_models()
        await self._grpc.start(service.inference, service.open_inference, manager)
        service.watch()

    async def answer_failed(self) -> None:
        """Behind `failed`: lets the refusals go out, for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFUSAL_SECONDS):
                await self.lifecycle.idle()

    def look_again(self) -> None:
        """Has the repository scanned now, as a change that the watcher sees does."""
        self.service.look_again()

    async def leave(self) -> None:
        """For `drain_delay_seconds`, tells health checks that this server is not to be called, and answers calls all
        the same: so load balancers turn away from it before it refuses any. Ends early if an engine fails."""
        self.lifecycle.phase = Phase.LEAVING
        if self._grpc is not None:
            await self._grpc.report_not_serving()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.failed.wait(), self.config.drain_delay_seconds)

    async def drain(self) -> bool:
        """Refuses new calls, finishes the running ones, and sends their responses. False if `drain_seconds` were not
        enough, or if engines fail meanwhile (then `failed` is set); then `stop` cancels what is left."""
        draining, failing = asyncio.create_task(self._drain()), asyncio.create_task(self.failed.wait())
        try:
            await asyncio.wait((draining, failing), return_when=asyncio.FIRST_COMPLETED)
            drained = draining.done() and draining.result()
        finally:
            draining.cancel()
            failing.cancel()
        await self.service.check_engines()
        if self.failed.is_set():
            return False
        self._overdue = not drained
        return drained

    async def _drain(self) -> bool:
        seconds = self.config.drain_seconds
        ends = None if seconds is None else time.monotonic() + seconds
        self.service.refuse()
        try:
            async with asyncio.timeout(seconds):
                if self._grpc is not None:
                    await self._grpc.report_not_serving()
                await self.lifecycle.idle()
                remaining = None if ends is None else max(0.0, ends - time.monotonic())
                if not await self.service.drain_engines(remaining):
                    return False
                for http in self._http():
                    await http.finish()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Cancels calls that are still running; after a `drain` in time there are none."""
        self.service.refuse()
        if self._grpc is not None:
            await self._grpc.stop(at_once=self._overdue)
        for http in self._http():
            await http.stop()
        await self.service.stop()

    def _http(self) -> list[HttpServer]:
        """The one with metrics and health last: it reports on the drain of the others."""
        return [http for http in (self._gateway, self._metrics_http) if http is not None]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
