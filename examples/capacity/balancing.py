"""Who gets a call: the policies of docs/balancing.md, as Envoy has them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Protocol

from beamline.protos import orca_pb2
from beamline.serving.contract.stats import StepStats
from beamline.serving.telemetry.load_report import LoadReport

_LABEL = "model"


class Policy(Protocol):
    def choose(self, now: float) -> int:
        """A server, by its number."""

    def answered(self, server: int, now: float) -> None: ...

    def stepped(self, server: int, now: float, active: int, queued: int) -> None: ...


class RoundRobin:
    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._next = -1

    def choose(self, now: float) -> int:
        self._next = (self._next + 1) % self._servers
        return self._next

    def answered(self, server: int, now: float) -> None:
        pass

    def stepped(self, server: int, now: float, active: int, queued: int) -> None:
        pass


class LeastRequest:
    """Of two that are drawn by chance, the one with fewer calls under way."""

    def __init__(self, servers: int, seed: int = 0, choices: int = 2) -> None:
        self._under_way = [0] * servers
        self._choices = choices
        self._chance = random.Random(seed)

    def choose(self, now: float) -> int:
        count = len(self._under_way)
        drawn = [int(self._chance.random() * count) for _ in range(self._choices)]
        found = min(drawn, key=self._under_way.__getitem__)
        self._under_way[found] += 1
        return found

    def answered(self, server: int, now: float) -> None:
        self._under_way[server] -= 1

    def stepped(self, server: int, now: float, active: int, queued: int) -> None:
        pass


class Weighted:
    """Round robin by weights, which follow the servers' load reports: calls per second over utilisation. The reports
    are made by the server's own code, with the simulation's clock."""

    def __init__(self, slots: Sequence[int], seed: int = 0, blackout: float = 5.0, period: float = 1.0) -> None:
        """`slots` of each server. `blackout`: how long a report of a new server is not believed."""
        self._now = 0.0
        self._blackout, self._period = blackout, period
        self._reports = [LoadReport(lambda: self._now) for _ in slots]
        self._slots = slots
        for report, count in zip(self._reports, slots, strict=True):
            report.serves(_LABEL, count)
        self._next_update = blackout
        self._chance = random.Random(seed)
        self._turns: list[tuple[float, int]] = []  # when each is next: earliest deadline first
        self._set([1.0] * len(slots))

    def choose(self, now: float) -> int:
        self._now = now
        if now >= self._next_update:
            self._update()
        turn, server = heapq.heappop(self._turns)
        heapq.heappush(self._turns, (turn + 1 / self._weights[server], server))
        return server

    def answered(self, server: int, now: float) -> None:
        self._now = now
        self._reports[server].call(failed=False)

    def stepped(self, server: int, now: float, active: int, queued: int) -> None:
        self._now = now
        self._reports[server].step(_LABEL, StepStats(self._slots[server], remaining=active, queued=queued))

    def _update(self) -> None:
        self._next_update = self._now + self._period
        weights = [self._weight(report) for report in self._reports]
        known = [weight for weight in weights if weight > 0]
        if not known:
            return
        usual = sorted(known)[len(known) // 2]
        self._set([weight or usual for weight in weights])

    def _set(self, weights: list[float]) -> None:
        self._weights = weights
        self._turns = [(self._chance.random() / weight, server) for server, weight in enumerate(weights)]
        heapq.heapify(self._turns)

    @staticmethod
    def _weight(report: LoadReport) -> float:
        found = orca_pb2.LoadReport.FromString(report.message())
        return found.rps_fractional / found.application_utilization if found.application_utilization > 0 else 0.0


def policy(name: str, slots: Sequence[int], seed: int = 0) -> Policy:
    """`slots` of each server."""
    if name == "round-robin":
        return RoundRobin(len(slots))
    if name == "least-request":
        return LeastRequest(len(slots), seed)
    return Weighted(slots, seed)


POLICIES = ("round-robin", "least-request", "weighted")
