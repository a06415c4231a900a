"""The composition root: builds a server from a `ServeConfig`, starts, drains and stops it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from beamline.serving.api.grpc.server import GrpcServer
from beamline.serving.api.guard import Guard
from beamline.serving.api.http import operating
from beamline.serving.api.http.app import gateway_app, operations_app
from beamline.serving.api.http.connections import ConnectionLimits
from beamline.serving.api.http.framing import Framing
from beamline.serving.api.http.server import HttpServer
from beamline.serving.api.inference import Inference
from beamline.serving.api.open_inference.servicer import OpenInferenceServicer
from beamline.serving.config import ServeConfig
from beamline.serving.descriptors import share_descriptors
from beamline.serving.engine.async_engine import fail_running
from beamline.serving.errors import ModelError, ShuttingDown
from beamline.serving.lifecycle import Lifecycle, Phase
from beamline.serving.models.loader import Driver, EngineMakers, ModelLoader, real_makers
from beamline.serving.models.manager import ModelManager
from beamline.serving.models.registry import Models
from beamline.serving.models.watcher import Watcher
from beamline.serving.security.access import Access, ClientLimit
from beamline.serving.security.tls import ServerTls
from beamline.serving.security.tokens import TokenFile
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.telemetry.tracing import tracing_of
from beamline.serving.text.host_work import TextWorkers

log = logging.getLogger(__name__)

_REFUSAL_SECONDS = 2.0


class Server:
    """Must be constructed inside the event loop that runs it."""

    def __init__(self, config: ServeConfig, makers: EngineMakers | None = None) -> None:
        self.config = config
        self._models = Models(default=config.default_model)
        self.lifecycle = Lifecycle(lambda: bool(self._models.everything()))
        self.metrics = Metrics()
        self._tracing = tracing_of()
        self.manager: ModelManager | None = None  # from `start` on
        self._makers = makers
        self._workers = TextWorkers(config.max_pending_bytes)
        self._metrics_http: HttpServer | None = None
        self._gateway: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._driver: Driver | None = None
        self._watching: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._rescan: asyncio.Task[None] | None = None
        self.failed = asyncio.Event()  # engines don't step any more: the process has to end
        self._overdue = False  # a drain was cut short

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
        config = self.config
        access = Access(None if config.tokens is None else TokenFile(config.tokens).client_of)
        guard = Guard(self.metrics, access, ClientLimit(config.max_calls_per_client), self._tracing)
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
            self._workers.check,
            config.max_connection_seconds,
            write_seconds,
        )
        if config.http_port is not None:
            limits = ConnectionLimits(connections.gateway, config.max_connections_per_address)
            self._gateway = HttpServer(config.host, config.http_port, tls, limits, guard.count_refusal, write_seconds)
        operations = operations_app(self.metrics, self.lifecycle, guard if config.metrics_need_token else None)
        await self._metrics_http.start(Framing(operations, self.lifecycle, guard.count_refusal))
        makers = self._makers or real_makers(config)
        models = self._models
        models.called = self.metrics.triton.call
        self._driver = makers.thread()
        self._driver.start()
        self._watchdog = asyncio.create_task(self._watch_engines(self._driver))
        inference = Inference(models, self.lifecycle, self._workers)
        if self._gateway is not None:
            more = operating.routes(lambda: self.manager, config.repository, self.metrics.history, guard)
            largest = (config.max_message_bytes, config.text.max_inputs)
            app = gateway_app(inference, models, self.lifecycle, guard, *largest, write_seconds, more)
            await self._gateway.start(Framing(app, self.lifecycle, guard.count_refusal))
        self.manager = manager = ModelManager(
            config.repository,
            ModelLoader(config, makers, self.metrics, self._workers),
            models,
            self._driver,
            versions="all" if config.all_versions else "newest",
            only=config.load,
            load_seconds=config.load_seconds,
        )
        watcher = self._watcher(manager)
        await manager.start(fake=config.fake, may_be_empty=watcher is not None)
        if watcher is None:
            models.check_default()
        self.lifecycle.phase = Phase.READY
        open_inference = OpenInferenceServicer(models, manager, self.lifecycle, guard, self._workers)
        await self._grpc.start(inference, open_inference, manager)
        if watcher is not None:
            self._watching = asyncio.create_task(watcher.run(config.watch_seconds or 0))

    async def _watch_engines(self, driver: Driver) -> None:
        """Liveness means that engines step. Where they don't any more, everyone is answered with UNAVAILABLE, health
        checks fail, and whoever runs the process is asked to end it."""
        patience = self.config.watchdog_seconds
        while (reason := driver.trouble(patience)) is None:
            await asyncio.sleep(min(1.0, patience / 4))
        log.critical("%s: refusing all calls", reason)
        self.lifecycle.phase = Phase.FAILED
        fail_running(ShuttingDown("an engine of this server failed, and it is ending; try another one"))
        if self._grpc is not None:
            await self._grpc.report_not_serving()
        self.failed.set()

    async def answer_failed(self) -> None:
        """Behind `failed`: lets the refusals go out, for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFUSAL_SECONDS):
                await self.lifecycle.idle()

    def _watcher(self, manager: ModelManager) -> Watcher | None:
        """Made before the models are loaded, so that it notices changes that are made meanwhile."""
        config = self.config
        if config.repository is None or config.watch_seconds is None:
            return None
        try:
            return Watcher(config.repository, manager.refresh)
        except OSError as error:
            raise ModelError(f"the model repository {config.repository} can't be read: {error.strerror}") from error

    def look_again(self) -> None:
        """Has the repository scanned now, as a change that the watcher sees does."""
        if self.manager is None or self.config.repository is None:
            return
        log.info("looking for changes in the model repository")
        self._rescan = asyncio.create_task(self.manager.refresh_all())

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
        enough; then `stop` cancels what is left."""
        self._overdue = not await self._drain()
        return not self._overdue

    async def _drain(self) -> bool:
        seconds = self.config.drain_seconds
        ends = None if seconds is None else time.monotonic() + seconds
        self.lifecycle.phase = Phase.DRAINING
        self._stop_watching()
        try:
            async with asyncio.timeout(seconds):
                if self._grpc is not None:
                    await self._grpc.report_not_serving()
                await self.lifecycle.idle()
                if self._driver is not None:
                    # Sequences of cancelled calls may still hold slots.
                    remaining = None if ends is None else max(0.0, ends - time.monotonic())
                    if not await asyncio.to_thread(self._driver.drain, remaining):
                        return False
                for http in self._http():
                    await http.finish()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Cancels calls that are still running; after a `drain` in time there are none."""
        self.lifecycle.phase = Phase.DRAINING
        self._stop_watching()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._grpc is not None:
            await self._grpc.stop(at_once=self._overdue)
        for http in self._http():
            await http.stop()
        if self._driver is not None:
            await asyncio.to_thread(self._driver.stop)
        await asyncio.to_thread(self._tracing.close)
        if self.manager is not None:
            self.manager.stop()
        self._workers.shutdown()

    def _http(self) -> list[HttpServer]:
        """The one with metrics and health last: it reports on the drain of the others."""
        return [http for http in (self._gateway, self._metrics_http) if http is not None]

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
