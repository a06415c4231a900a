"""One thread that drives all engines of a device, with equal shares of its time, and sleeps while none has work.

Engines come and go between two steps: one that is retired finishes what it has, and then nothing here keeps it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from beamline.serving.contract.manifest import AnyManifest
from beamline.serving.engine.request import RequestOutput, deliver
from beamline.serving.errors import ComputeError, DeviceLost, ShuttingDown

E = TypeVar("E")

_LEAST = 1e-6  # seconds; a step that takes no time still counts as a turn


class FairShare(Generic[E]):
    """Which engine's step is next, where several models share a device: the one that has used least of its time. One
    that was idle comes back level with the one that is furthest behind: it is owed nothing for its absence."""

    def __init__(self) -> None:
        self._used: WeakKeyDictionary[E, float] = WeakKeyDictionary()  # of those that are unloaded, nothing is kept
        self._busy: WeakSet[E] = WeakSet()  # no addresses: a new engine may have that of one that is gone

    def next(self, busy: Sequence[E]) -> E:
        """One of those that have work. There must be one."""
        staying = [self._used[each] for each in busy if each in self._busy]
        floor = min(staying, default=max(self._used.values(), default=0.0))
        for each in busy:
            if each not in self._busy:
                self._used[each] = max(floor, self._used.get(each, floor))
        self._busy = WeakSet(busy)
        return min(busy, key=lambda each: self._used[each])

    def charge(self, engine: E, seconds: float) -> None:
        self._used[engine] = self._used.get(engine, 0.0) + max(seconds, _LEAST)


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

    def abandon(self, error: Exception) -> list[RequestOutput]: ...


class EngineThread:
    def __init__(self, engines: Iterable[Steppable] = ()) -> None:
        self._lock = threading.Lock()
        self._engines: list[Steppable] = []
        self._retiring: dict[Steppable, Gone] = {}
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._started = False
        self._stopping = False
        self._failure: str | None = None
        self._step_began: float | None = None  # of the step that is running
        self._turns: FairShare[Steppable] = FairShare()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        for engine in engines:
            self.add(engine)

    def start(self) -> None:
        self._thread.start()
        self._started = True

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
        """Ends the thread after its current step; requests that are still here get an error."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def trouble(self, patience: float) -> str | None:
        """Why engines don't step any more, for a watchdog: one has lost its device, a step takes longer than
        `patience` seconds, or the thread itself has ended. None while all is well."""
        if self._failure is not None:
            return self._failure
        if self._started and not self._stopping and not self._thread.is_alive():
            return "the engine's thread has ended"
        began = self._step_began
        if began is not None and time.perf_counter() - began > patience:
            return f"a step has not ended for {patience:g} seconds"
        return None

    def _all(self) -> list[Steppable]:
        with self._lock:
            return list(self._engines)

    def _run(self) -> None:
        try:
            self._drive()
        except Exception:  # not of a step, which is recovered from
            log.critical("the engine's thread failed, and ends", exc_info=True)
            self._failure = "the engine's thread has ended"
        for engine in self._all():
            self._end(engine)

    def _drive(self) -> None:
        while not self._stopping:
            self._wake.clear()
            worked = self._turn()
            self._let_go()
            if not worked:
                self._idle.set()
                self._wake.wait()

    @staticmethod
    def _end(engine: Steppable) -> None:
        """Nobody waits for what will never come, whatever became of the others."""
        try:
            engine.drain()
            deliver(engine.fail_everything(ShuttingDown("the server was stopped")))
        except Exception:
            log.exception("the requests of %s could not be answered in order", engine.manifest.name)
            with suppress(Exception):
                deliver(engine.abandon(ShuttingDown("the server was stopped")))

    def _turn(self) -> bool:
        """One step of the engine that is next; false if none has work. A function of its own, so that while the thread
        sleeps no variable keeps an engine, and its memory, alive."""
        busy = [engine for engine in self._all() if engine.busy]
        if not busy:
            return False
        engine = self._turns.next(busy)
        self._step_began = began = time.perf_counter()
        try:
            deliver(engine.step())
        except DeviceLost:
            self._abandon(engine)  # to fail everybody need not touch the device, and would not notice
        except Exception:
            # Not a request's fault, so all of them get an answer; the next ones may fare better.
            log.exception("a step of %s's engine failed", engine.manifest.name)
            self._recover(engine)
        finally:
            self._step_began = None
        self._turns.charge(engine, time.perf_counter() - began)
        return True

    def _recover(self, engine: Steppable) -> None:
        try:
            deliver(engine.fail_everything(ComputeError("the engine failed")))
        except Exception:
            self._abandon(engine)  # it can't even be reset

    def _abandon(self, engine: Steppable) -> None:
        """While the exception is handled that says why."""
        name = engine.manifest.name
        log.critical("the device of %s is lost", name, exc_info=True)
        try:
            deliver(engine.abandon(ShuttingDown("the device failed, and this server is ending; try another one")))
        except Exception:
            log.exception("the requests of %s could not all be answered", name)
        with self._lock:
            self._engines.remove(engine)
        self._failure = f"the device of {name} is lost"

    def _let_go(self) -> None:
        """Of engines that have finished. A function of its own, as `_turn`: no variable keeps the last one alive."""
        with self._lock:
            over = [engine for engine in self._retiring if not engine.busy]
            self._engines = [engine for engine in self._engines if engine not in over]
            callbacks = [self._retiring.pop(engine) for engine in over]
        del over
        while callbacks:
            try:
                callbacks.pop()()
            except Exception:
                log.exception("what follows an engine's end failed")
