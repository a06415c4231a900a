"""One thread that drives all engines of a device, with equal shares of its time, and sleeps while none has work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.engine.fairness import FairShare
from serving.errors import ComputeError, ShuttingDown
from serving.manifest import AnyManifest

log = logging.getLogger(__name__)


class Driven(Protocol):
    """What the thread needs of an engine, whatever it computes."""

    wake: Callable[[], None]

    @property
    def manifest(self) -> AnyManifest: ...

    @property
    def busy(self) -> bool: ...

    def step(self) -> object: ...

    def drain(self) -> None: ...

    def fail_everything(self, error: Exception) -> None: ...


class EngineThread:
    def __init__(self, engines: Sequence[Driven]) -> None:
        self.engines = list(engines)
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._turns: FairShare[Driven] = FairShare()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        for engine in self.engines:
            engine.wake = self._wake.set

    def start(self) -> None:
        self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new work and finishes what is here; true if all of it was finished in time."""
        for engine in self.engines:
            engine.drain()
        self._idle.clear()
        self._wake.set()
        return self._idle.wait(timeout) if self._thread.is_alive() else True

    def stop(self) -> None:
        """Ends the thread after its current step; whoever is still here gets an error."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            busy = [engine for engine in self.engines if engine.busy]
            if not busy:
                self._idle.set()
                self._wake.wait()
                continue
            engine = self._turns.next(busy)
            began = time.perf_counter()
            try:
                engine.step()
            except Exception:
                # Not a request's fault, so all of them get an answer; the next ones may fare better.
                log.exception("a step of %s's engine failed", engine.manifest.name)
                engine.fail_everything(ComputeError("the engine failed"))
            self._turns.charge(engine, time.perf_counter() - began)
        for engine in self.engines:
            engine.drain()
            engine.fail_everything(ShuttingDown("the server was stopped"))
