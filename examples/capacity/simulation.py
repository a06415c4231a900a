"""Servers behind a balancer, computed instead of waited for: a discrete-event simulation.

A server's engine goes in steps: whoever has arrived by the beginning of a step and finds a free slot takes part in it,
who has had all of its steps leaves, and an idle engine begins at once. What a step takes depends on how many take part.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.capacity.balancing import Policy, RoundRobin

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the load tester finds of one server."""

    slots: int  # of all its engines
    step_seconds: float  # of a step without anyone
    request_seconds: float = 0.0  # what each request that takes part adds to it
    way_seconds: float = 0.0  # of a call, outside the engine: network, balancer, text
    engines: int = 1  # that share the slots; a request goes to the least busy one

    def step(self, active: int) -> float:
        return self.step_seconds + active * self.request_seconds

    def capacity(self, steps: float) -> float:
        """Requests per second with all slots taken, of so many steps in the mean."""
        return self.slots / (steps * self.step(self.slots // self.engines))


@dataclass(frozen=True, slots=True)
class Outcome:
    latencies: Floats  # from arrival to answer
    servers: NDArray[np.int64]  # which of them answered


def simulate(
    arrivals: Sequence[float] | Floats,
    steps: Sequence[int] | NDArray[np.int64],
    machines: Sequence[Machine],
    policy: Policy,
) -> Outcome:
    """`steps`: of each request. `arrivals` ascend."""
    servers = [[_Engine(machine, number) for _ in range(machine.engines)] for number, machine in enumerate(machines)]
    latencies = np.zeros(len(arrivals))
    chosen = np.zeros(len(arrivals), np.int64)
    events: list[tuple[float, int, _Engine]] = []  # when an engine's step ends; the number is for equal times
    arrived = pushed = 0
    while arrived < len(arrivals) or events:
        # Who comes at the very end of a step takes part in the next one.
        if arrived < len(arrivals) and (not events or arrivals[arrived] <= events[0][0]):
            now = float(arrivals[arrived])
            number = policy.choose(now)
            engine = min(servers[number], key=_Engine.load)
            engine.waiting.append((arrived, int(steps[arrived])))
            chosen[arrived] = number
            arrived += 1
            begins = not engine.running
        else:
            now, _, engine = heapq.heappop(events)
            number = engine.server
            for request in engine.finish_step():
                latencies[request] = now - arrivals[request] + engine.machine.way_seconds
                policy.answered(number, now)
            active, queued = (sum(each) for each in zip(*(engine.counts() for engine in servers[number]), strict=True))
            policy.stepped(number, now, active, queued)
            begins = bool(engine.load())
        if begins:
            pushed += 1
            heapq.heappush(events, (now + engine.begin_step(), pushed, engine))
    return Outcome(latencies, chosen)


class _Engine:
    def __init__(self, machine: Machine, server: int) -> None:
        self.machine = machine
        self.server = server
        self._slots = machine.slots // machine.engines
        self.waiting: deque[tuple[int, int]] = deque()  # request, its steps
        self.active = 0
        self.running = False
        self._step = 0
        self._last: dict[int, list[int]] = {}  # by the number of a step: whose last one it is

    def counts(self) -> tuple[int, int]:
        return self.active, len(self.waiting)

    def load(self) -> int:
        return self.active + len(self.waiting)

    def begin_step(self) -> float:
        """Seconds until its end."""
        self.running = True
        while self.waiting and self.active < self._slots:
            request, steps = self.waiting.popleft()
            self._last.setdefault(self._step + steps - 1, []).append(request)
            self.active += 1
        return self.machine.step(self.active)

    def finish_step(self) -> list[int]:
        """Who is answered."""
        answered = self._last.pop(self._step, [])
        self._step += 1
        self.active -= len(answered)
        self.running = False
        return answered


def latencies(arrivals: Sequence[float], steps: int, slots: int, step_seconds: float) -> Floats:
    """Of one server, for requests of `steps` steps each."""
    return simulate(arrivals, [steps] * len(arrivals), [Machine(slots, step_seconds)], RoundRobin(1)).latencies
