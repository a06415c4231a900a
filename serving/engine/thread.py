"""One thread that drives all engines of a device, with equal shares of its time, and sleeps while none has work.

Engines come and go between two steps: one that is retired finishes what it has, and then nothing here keeps it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from beamline.serving.contract.manifest import AnyManifest
from beamline.serving.engine.fair_share import FairShare
from beamline.serving.engine.request import RequestOutput, deliver
from beamline.serving.errors import ComputeError, ShuttingDown

log = logging.getLogger(__name__)

Gone = Callable[[], None]


class Steppable(Protocol):
    """What the thread needs of an engine, whatever it computes."""

    wake: Callable[[], None]

    @property
    def manifest(self) -> AnyManifest: ...

    @property
    def busy(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def drain(self) -> None: ...

    def fail_everything(self, error: Exception) -> list[RequestOutput]: ...


class EngineThread:
    def __init__(self, engines: Iterable[Steppable] = ()) -> None:
        self._lock = threading.Lock()
        self._engines: list[Steppable] = []
        self._retiring: dict[Steppable, Gone] = {}
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._turns: FairShare[Steppable] = FairShare()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        for engine in engines:
            self.add(engine)

    def start(self) -> None:
        self._thread.start()

    def add(self, engine: Steppable) -> None:
        """From any thread; it takes part from the next step on."""
        engine.wake = self._wake.set
        with self._lock:
            self._engines.append(engine)
        self._wake.set()

    def retire(self, engine: Steppable, gone: Gone) -> None:
        """It takes no new work. `gone` is called on the engine's thread when it has finished what it had."""
        engine.drain()
        with self._lock:
            self._retiring[engine] = gone
        self._wake.set()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new work and finishes what is here; true if all of it was finished in time."""
        for engine in self._all():
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

    def _all(self) -> list[Steppable]:
        with self._lock:
            return list(self._engines)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            worked = self._turn()
            for gone in self._let_go():
                gone()
            if not worked:
                self._idle.set()
                self._wake.wait()
        for engine in self._all():
            engine.drain()
            deliver(engine.fail_everything(ShuttingDown("the server was stopped")))

    def _turn(self) -> bool:
        """One step of whoever is next; false if nobody has work. A function of its own, so that while the thread
        sleeps no variable keeps an engine, and its memory, alive."""
        busy = [engine for engine in self._all() if engine.busy]
        if not busy:
            return False
        engine = self._turns.next(busy)
        began = time.perf_counter()
        try:
            deliver(engine.step())
        except Exception:
            # Not a request's fault, so all of them get an answer; the next ones may fare better.
            log.exception("a step of %s's engine failed", engine.manifest.name)
            deliver(engine.fail_everything(ComputeError("the engine failed")))
        self._turns.charge(engine, time.perf_counter() - began)
        return True

    def _let_go(self) -> list[Gone]:
        """The callbacks of engines that are gone now."""
        with self._lock:
            over = [engine for engine in self._retiring if not engine.busy]
            for engine in over:
                self._engines.remove(engine)
            return [self._retiring.pop(engine) for engine in over]
