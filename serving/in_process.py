"""One model in this process, without a server: an event loop in a thread, beside the threads of its engines.

What runs on the loop is what runs behind gRPC: `api/inference.py`. Whoever calls, from threads or from other event
loops, leaves a coroutine here and waits for it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from beamline.serving.api.inference import Inference
from beamline.serving.backends.selection import DEVICE_OPTIONS
from beamline.serving.config import MIB, ServeConfig, TextLimits
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.replicas import DeviceThreads, members
from beamline.serving.errors import BeamlineError, InvalidRequest, ModelError
from beamline.serving.lifecycle import Lifecycle, Phase
from beamline.serving.models.loader import Driver, ModelLoader, ServedModel, real_makers
from beamline.serving.models.registry import Models
from beamline.serving.models.repository import find
from beamline.serving.models.settings import ModelSettings, read_settings
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.text.host_work import TextWorkers

_EXIT_SECONDS = 5.0  # that an interpreter which ends waits for a step that runs
_MOST = 1_000_000_000
# Nobody else's memory is at stake here: what a caller asks for may wait, and a reader may be slow.
_NO_LIMITS = TextLimits(max_inputs=_MOST, max_sequences=_MOST, max_unread_tokens=_MOST)

CLOSED = "this model is closed"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """0: as the model's serving.toml says, else as suits it and the machine."""

    version: int | None = None
    device: str = "auto"
    threads: int = 0
    engines: int = 0
    slots: int = 0
    queue: int = 0  # 0: as many may wait as come
    prefix_cache_mib: int = 512

    def __post_init__(self) -> None:
        for name in ("threads", "engines", "slots", "queue", "prefix_cache_mib"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidRequest(f"{name} is {value!r:.60}; it must be a whole number, 0 or more")
        if self.device not in DEVICE_OPTIONS:
            raise InvalidRequest(f"device is {self.device!r:.60}; it must be one of {', '.join(DEVICE_OPTIONS)}")
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise InvalidRequest(f"version is {self.version!r:.60}; it must be a whole number, 1 or more")


class InProcess:
    """Safe to use from many threads. Ends by `close`, when nothing refers to it any more, or with the interpreter."""

    def __init__(self, served: ServedModel, driver: Driver, workers: TextWorkers) -> None:
        self.manifest = served.manifest
        self.slots = served.slots
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        lifecycle = Lifecycle()
        lifecycle.phase = Phase.READY
        self._inference: Inference | None = Inference(Models([served.model]), lifecycle, workers)
        driver.add(served.engine)
        # Neither the threads nor what ends them refers to this object: so it can be collected while they run.
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="beamline-calls", daemon=True)
        self._end = weakref.finalize(self, _end, self._loop, driver, workers)
        self._end.atexit = False  # `_end_all` does that, and waits
        driver.start()
        self._thread.start()
        _alive.add(self)
        # Anew for each, so that it goes before what the runtimes that have been imported do at the end.
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    @property
    def inference(self) -> Inference:
        """For coroutines that are submitted."""
        if self._inference is None:
            raise BeamlineError(CLOSED)
        return self._inference

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Runs it on the loop. Cancelling the future cancels it there."""
        try:
            if os.getpid() != self._process:
                raise BeamlineError("this model was loaded before the process forked: load it in the child")
            with self._lock:  # what is submitted before the end is cancelled by it
                if self._closed:
                    raise BeamlineError(CLOSED)
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise

    def close(self, timeout: float | None = None) -> None:
        """Cancels what runs, and returns when the threads have ended."""
        with self._lock:
            self._closed = True
        finalizer = self._end.detach()  # not called: weakref calls none while the interpreter ends
        if finalizer is not None:
            _, end, arguments, _ = finalizer
            end(*arguments)
        if self._process == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._inference = None  # and with it weights and caches


_alive: weakref.WeakSet[InProcess] = weakref.WeakSet()


def _end_all() -> None:
    """A thread inside a runtime's step while the interpreter, or the runtime, is taken down would crash it."""
    for each in list(_alive):
        each.close(_EXIT_SECONDS)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, driver: Driver, workers: TextWorkers) -> None:
    """From any thread, the loop's own among them: the garbage collector chooses."""
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(lambda: loop.create_task(_shut_down(loop, driver, workers)))


async def _shut_down(loop: asyncio.AbstractEventLoop, driver: Driver, workers: TextWorkers) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    driver.stop()
    workers.shutdown(wait=True)
    loop.stop()


def load(path: Path, options: LoadOptions) -> InProcess:
    """Checked against its hashes, and warm. Raises `ModelNotFound` or `ModelError`."""
    found = find(path, options.version)
    settings = read_settings(found.folder.parent)
    if options.version is None and found.folder != Path(os.path.abspath(path)) and isinstance(settings.versions, tuple):
        found = find(path, among=settings.versions)
    if isinstance(found.manifest, PooledManifest) and options.engines:
        raise ModelError(f"engines is {options.engines}, but {found.name} decodes nothing: leave it away")
    config = ServeConfig(
        device=options.device,
        threads=options.threads,
        max_queue=_MOST,
        early_refusal=False,
        prefix_cache_bytes=options.prefix_cache_mib * MIB,
        text=_NO_LIMITS,
    )
    workers = TextWorkers(max_bytes=sys.maxsize)
    loader = ModelLoader(config, real_makers(config), Metrics(), workers)
    served = loader.load(found, _settings(settings, options), found.name)
    driven = members(served.engine)
    for engine in driven:
        engine.observe = _ignore_stats
    gpus = max((each.device + 1 for each in driven if each.device is not None), default=0)
    return InProcess(served, DeviceThreads(len(driven), gpus), workers)


def _ignore_stats(step: StepStats) -> None:
    """A server counts what its engines say of each step; nobody could ask for it here."""


def _settings(on_disk: ModelSettings, options: LoadOptions) -> ModelSettings:
    """What was asked for goes before serving.toml. Its queue is a server's, whose callers are strangers."""
    asked: dict[str, Any] = {"queue": options.queue or None}
    asked |= {name: value for name in ("engines", "slots") if (value := getattr(options, name))}
    if options.device != "auto":
        asked["device"] = options.device
    return on_disk.model_copy(update=asked)
