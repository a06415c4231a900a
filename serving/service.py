"""All that answers calls, without a port: models and engines, the guard, and the APIs' applications.

`server.py` puts ports of its own before it; a replica of a Ray application (`beamline/ray`) is called by Ray's proxies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import cached_property

from starlette.applications import Starlette
from starlette.routing import Route

from beamline.serving.api.guard import Guard
from beamline.serving.api.http import operating
from beamline.serving.api.http.app import gateway_app, operations_app
from beamline.serving.api.http.call import Gateway
from beamline.serving.api.inference import Inference
from beamline.serving.api.open_inference.methods import OpenInference
from beamline.serving.config import ServeConfig
from beamline.serving.engine.async_engine import fail_running
from beamline.serving.errors import ModelError, ShuttingDown
from beamline.serving.lifecycle import Lifecycle, Phase
from beamline.serving.models.loader import Driver, EngineMakers, ModelLoader, real_makers
from beamline.serving.models.manager import ModelManager
from beamline.serving.models.registry import Models
from beamline.serving.models.remote import RemoteRepository
from beamline.serving.models.watcher import Watcher
from beamline.serving.security.access import Access, ClientLimit
from beamline.serving.security.tokens import TokenFile
from beamline.serving.telemetry.gpus import watch_gpus
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.telemetry.tracing import tracing_of
from beamline.serving.text.host_work import TextWorkers

log = logging.getLogger(__name__)


async def _nothing() -> None:
    pass


class Service:
    """Must be constructed inside the event loop that runs it. Then `start_engines`, `load_models`; at last `stop`."""

    def __init__(self, config: ServeConfig, makers: EngineMakers | None = None) -> None:
        self.config = config
        self.models = Models(default=config.default_model)
        self.lifecycle = Lifecycle(lambda: config.on_demand or bool(self.models.everything()))
        self.metrics = Metrics()
        self.workers = TextWorkers(config.max_pending_bytes)
        self.manager: ModelManager | None = None  # from `load_models` on
        self.inference = Inference(self.models, self.lifecycle, self.workers)
        self.open_inference = OpenInference(self.models, self.managing, self.lifecycle, self.workers)
        self.failed = asyncio.Event()  # engines don't step any more: the process has to end
        self.when_failed: Callable[[], Awaitable[None]] = _nothing  # called before that is set
        self._tracing = tracing_of()
        self._makers = makers
        self._driver: Driver | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._watcher: Watcher | None = None
        self._watching: asyncio.Task[None] | None = None
        self._copy: RemoteRepository | None = None  # of a repository elsewhere
        self._rescan: asyncio.Task[None] | None = None

    @cached_property
    def guard(self) -> Guard:
        """Made when it is first needed, because a file of tokens may be missing."""
        config = self.config
        access = Access(None if config.tokens is None else TokenFile(config.tokens).client_of)
        limit = ClientLimit(config.max_calls_per_client)
        return Guard(self.metrics, access, limit, self._tracing, config.load_reports)

    # -- the APIs ------------------------------------------------------------------------------------------------

    def operations_app(self) -> Starlette:
        return operations_app(self.metrics, self.lifecycle, self.guard if self.config.metrics_need_token else None)

    def gateway_app(self, more: list[Route]) -> Starlette:
        """`more`: routes besides those of the models."""
        config = self.config
        gateway = Gateway(self.guard, self.lifecycle, self.workers, config.max_message_bytes, config.write_seconds)
        return gateway_app(gateway, self.inference, self.open_inference, self.models, config.text.max_inputs, more)

    def operating_routes(self) -> list[Route]:
        return operating.routes(self.managing, self.config.repository, self.metrics.history, self.guard)

    def managing(self) -> ModelManager:
        """For APIs that answer before the models are loaded."""
        if self.manager is None:
            raise ShuttingDown("the server is loading its models; try again")
        return self.manager

    # -- engines and models --------------------------------------------------------------------------------------

    def start_engines(self) -> None:
        if self._makers is None:
            self._makers = real_makers(self.config)
        watch_gpus(self.metrics.registry, self._makers.gpus)
        self.models.called = self.metrics.triton.call
        self._driver = self._makers.thread()
        self._driver.start()
        self._watchdog = asyncio.create_task(self._watch_engines(self._driver))

    async def load_models(self) -> ModelManager:
        """Returns when all are loaded, and calls are answered."""
        config = self.config
        assert self._makers is not None, "the engines were not started"
        assert self._driver is not None
        if config.remote is not None and config.repository is not None:
            self._copy = await asyncio.to_thread(RemoteRepository, config.remote, config.repository)
            await asyncio.to_thread(self._copy.sync)
        self.manager = manager = ModelManager(
            config.repository,
            ModelLoader(config, self._makers, self.metrics, self.workers),
            self.models,
            self._driver,
            versions="all" if config.all_versions else "newest",
            only=config.load,
            load_seconds=config.load_seconds,
            name=config.model_name,
            on_demand=config.on_demand,
        )
        self._watcher = self._make_watcher(manager)
        may_be_empty = self._watcher is not None or config.on_demand
        await manager.start(fake=config.fake, may_be_empty=may_be_empty)
        if not may_be_empty:
            self.models.check_default()
        self.lifecycle.phase = Phase.READY
        return manager

    def watch(self) -> None:
        """Follows changes in the repository from now on, where that is wanted."""
        if self._watcher is not None:
            self._watching = asyncio.create_task(self._watcher.run(self.config.watch_seconds or 0))

    async def _watch_engines(self, driver: Driver) -> None:
        """Liveness means that engines step. Where they don't any more, everyone is answered with UNAVAILABLE, health
        checks fail, and whoever runs the process is asked to end it."""
        patience = self.config.watchdog_seconds
        while not await self._check(driver):
            await asyncio.sleep(min(1.0, patience / 4))

    async def check_engines(self) -> None:
        """Sets `failed` where engines don't step any more, without waiting for the watchdog's next look."""
        if self._driver is not None:
            await self._check(self._driver)

    async def _check(self, driver: Driver) -> bool:
        """Whether they failed."""
        if (reason := driver.trouble(self.config.watchdog_seconds)) is None:
            return False
        if not self.lifecycle.live:  # somebody else has noticed, and is telling everyone
            await self.failed.wait()
            return True
        log.critical("%s: refusing all calls", reason)
        self.lifecycle.phase = Phase.FAILED
        fail_running(ShuttingDown("an engine of this server failed, and it is ending; try another one"))
        await self.when_failed()
        self.failed.set()
        return True

    def _make_watcher(self, manager: ModelManager) -> Watcher | None:
        """Made before the models are loaded, so that it notices changes that are made meanwhile."""
        config = self.config
        if config.repository is None or config.watch_seconds is None:
            return None
        try:
            sync = None if self._copy is None else self._copy.sync
            return Watcher(config.repository, manager.refresh, config.model_name, sync)
        except OSError as error:
            raise ModelError(f"the model repository {config.repository} can't be read: {error.strerror}") from error

    def look_again(self) -> None:
        """Has the repository scanned now, as a change that the watcher sees does."""
        if self.manager is None or self.config.repository is None:
            return
        log.info("looking for changes in the model repository")
        self._rescan = asyncio.create_task(self._look_again(self.manager))

    async def _look_again(self, manager: ModelManager) -> None:
        if self._copy is not None:
            await asyncio.to_thread(self._copy.sync)
        await manager.refresh_all()

    # -- the end -------------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """Takes no new calls, and changes no models any more."""
        self.lifecycle.phase = Phase.DRAINING
        if self._watching is not None:
            self._watching.cancel()

    async def drain_engines(self, seconds: float | None) -> bool:
        """Behind the last call: sequences of cancelled calls may still hold slots. False if it took longer."""
        return self._driver is None or await asyncio.to_thread(self._driver.drain, seconds)

    async def stop(self) -> None:
        """Behind all calls. Those that still run are cancelled."""
        self.refuse()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._driver is not None:
            await asyncio.to_thread(self._driver.stop)
        await asyncio.to_thread(self._tracing.close)
        if self.manager is not None:
            self.manager.stop()
        self.workers.shutdown()
