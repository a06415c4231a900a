"""One model as several engines (replicas), on as many devices or sharing one CPU: a request goes to the least busy one.

A GPU, or a share of the CPU, has one thread, which the engines of all models share there; an engine without replicas
belongs to the first. A model on the CPU never keeps a GPU waiting, nor the other way round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from beamline.serving.contract.stats import DeviceStats, StepStats
from beamline.serving.engine.completion import Occupied
from beamline.serving.engine.core import Engine
from beamline.serving.engine.request import Request
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import Overloaded


class Replicas:
    """To its callers it is an engine. Each member is driven by a thread of its own (`DeviceThreads`)."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        first = self.engines[0]
        self.manifest = first.manifest
        slots = sum(engine.plan.slots for engine in self.engines)
        self.plan = replace(first.plan, slots=slots, engines=len(self.engines))
        self.reserved_bytes = sum(engine.reserved_bytes for engine in self.engines)
        self._lock = threading.Lock()
        self._turn = 0
        for before, engine in zip(self.engines, self.engines[1:], strict=False):
            engine.completion.first_slot = before.completion.first_slot + before.plan.slots

    def submit(self, request: Request) -> None:
        """Where one is full, the next may not be: only when all are is the request refused."""
        refusal: Overloaded | None = None
        for engine in self._least_loaded():
            try:
                return engine.submit(request)
            except Overloaded as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def occupied(self) -> list[Occupied]:
        return [each for engine in self.engines for each in engine.occupied()]

    def stop_hypothesis(self, request_id: int, index: int = 0) -> None:
        for engine in self.engines:  # those that don't know it ignore it
            engine.stop_hypothesis(request_id, index)

    def cancel(self, request_id: int) -> None:
        for engine in self.engines:  # those that don't know it ignore it
            engine.cancel(request_id)

    def _least_loaded(self) -> list[Engine]:
        """Least first; among equals in turn, so that idle replicas are used evenly."""
        with self._lock:
            self._turn = (self._turn + 1) % len(self.engines)
            rotated = [*self.engines[self._turn :], *self.engines[: self._turn]]
        return sorted(rotated, key=lambda engine: engine.load)


class CombinedStats:
    """The statistics of several engines, as if they were one."""

    def __init__(self, observe: Callable[[StepStats], None], count: int) -> None:
        self._observe = observe
        self._lock = threading.Lock()
        self._last: list[StepStats | None] = [None] * count

    def observers(self) -> list[Callable[[StepStats], None]]:
        return [partial(self._stepped, index) for index in range(len(self._last))]

    def _stepped(self, index: int, step: StepStats) -> None:
        """What is so at this moment is added up; what happened in a step is that step's."""
        with self._lock:
            before = self._last[index]
            device = step.device or (None if before is None else before.device)
            self._last[index] = replace(step, device=device)
            all_of_them = [each for each in self._last if each is not None]
        self._observe(
            replace(
                step,
                remaining=sum(each.remaining for each in all_of_them),
                queued=sum(each.queued for each in all_of_them),
                live_entries=sum(each.live_entries for each in all_of_them),
                prefix_cache_bytes=sum(each.prefix_cache_bytes for each in all_of_them),
                device=None if step.device is None else _together(all_of_them),
            )
        )


def _together(steps: Sequence[StepStats]) -> DeviceStats | None:
    known = [step.device for step in steps if step.device is not None]
    return reduce(lambda one, other: one + other, known) if known else None


class DeviceThreads:
    """The threads of all devices, as one."""

    def __init__(self, cpu: int, gpus: int = 0) -> None:
        """`cpu`: into how many shares it may be divided."""
        self._cpu = [EngineThread() for _ in range(cpu)]
        self._gpus = [EngineThread() for _ in range(gpus)]
        self._threads = [*self._cpu, *self._gpus]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def add(self, engine: Engine | Replicas) -> None:
        for thread, member in self._placed(engine):
            thread.add(member)

    def _placed(self, engine: Engine | Replicas) -> list[tuple[EngineThread, Any]]:
        shares = iter(self._cpu)
        return [(next(shares) if each.device is None else self._gpus[each.device], each) for each in members(engine)]

    def retire(self, engine: Engine | Replicas, gone: Callable[[], None]) -> None:
        """`gone` is called once, when the last member has finished."""
        placed = self._placed(engine)
        remaining, lock = len(placed), threading.Lock()

        def one_gone() -> None:
            nonlocal remaining
            with lock:
                remaining -= 1
                last = remaining == 0
            if last:
                gone()

        for thread, member in placed:
            thread.retire(member, one_gone)

    def drain(self, timeout: float | None = None) -> bool:
        """All at once: each refuses new work before the first is waited for."""
        ends = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.drain(0)
        finished = [
            thread.drain(None if ends is None else max(0.0, ends - time.monotonic())) for thread in self._threads
        ]
        return all(finished)

    def trouble(self, patience: float) -> str | None:
        return next((why for thread in self._threads if (why := thread.trouble(patience)) is not None), None)

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()


def members(engine: Any) -> tuple[Any, ...]:
    """The engines that are driven, each by a thread of its own."""
    return engine.engines if isinstance(engine, Replicas) else (engine,)
