"""How busy this server is, for load balancers: an ORCA load report that goes out with every answer.

A balancer that weighs servers (gRPC's and Envoy's weighted round robin) gives each a weight of calls per second over
utilisation. Utilisation is here, of the busiest model, the requests in its engine, decoded or waiting, for each of its
slots. As requests in an engine are their rate times their latency, a server's weight falls as its latency rises.

All figures are averages over the last seconds, in which what is older counts less and less: what stands in the slots at
the moment when a call ends says little, because then a slot has just become free.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from beamline.protos import orca_pb2
from beamline.serving.contract.stats import StepStats

GRPC_TRAILER = "endpoint-load-metrics-bin"  # the message
HTTP_HEADER = "endpoint-load-metrics"  # the same as text

_SECONDS = 5.0  # what is as old as this counts for a third (1/e)
Clock = Callable[[], float]


class _Average:
    """Of a value that stays as it is until it is set again, over time."""

    def __init__(self, now: float) -> None:
        self._value, self._average, self._since = 0.0, 0.0, now

    def set(self, value: float, now: float) -> None:
        self._average, self._value, self._since = self.at(now), value, now

    def at(self, now: float) -> float:
        old = math.exp(-max(0.0, now - self._since) / _SECONDS)
        return old * self._average + (1 - old) * self._value


class _Rate:
    """Events per second."""

    def __init__(self, now: float) -> None:
        self._began = self._since = now
        self._count = 0.0

    def count(self, now: float) -> None:
        self._count, self._since = self._left(now) + 1, now

    def at(self, now: float) -> float:
        """What came before the server was there is not counted as nothing."""
        seconds = _SECONDS * (1 - math.exp(-(now - self._began) / _SECONDS))
        return self._left(now) / max(seconds, 1e-3)

    def _left(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._since) / _SECONDS)


class LoadReport:
    """Thread-safe: engines tell it of their steps, APIs of their calls."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        now = clock()
        self._clock = clock
        self._lock = threading.Lock()
        self._models: dict[str, tuple[int, int, int]] = {}  # slots, active, queued
        self._utilisation, self._active, self._queued = _Average(now), _Average(now), _Average(now)
        self._calls, self._errors = _Rate(now), _Rate(now)

    def serves(self, label: str, slots: int) -> None:
        """A model that has just been loaded, or, without slots, has left."""
        with self._lock:
            self._models.pop(label, None)
            if slots:
                self._models[label] = (slots, 0, 0)
            self._measure()

    def step(self, label: str, step: StepStats) -> None:
        with self._lock:
            if label in self._models:
                self._models[label] = (self._models[label][0], step.remaining, step.queued)
                self._measure()

    def call(self, failed: bool) -> None:
        """A call that asked a model has ended. `failed`: by our fault, or because of our load."""
        with self._lock:
            now = self._clock()
            self._calls.count(now)
            if failed:
                self._errors.count(now)

    def utilisation(self) -> float:
        """Of the busiest model, the requests that are decoded or wait, for each slot."""
        return self._report().application_utilization

    def slots(self) -> int:
        """Of the model with the most."""
        with self._lock:
            return max((slots for slots, _, _ in self._models.values()), default=0)

    def message(self) -> bytes:
        return self._report().SerializeToString()

    def text(self) -> str:
        report = self._report()
        fields = {
            "application_utilization": report.application_utilization,
            "rps_fractional": report.rps_fractional,
            "eps": report.eps,
            **{f"named_metrics.{name}": value for name, value in sorted(report.named_metrics.items())},
        }
        return "TEXT " + ",".join(f"{name}={value:.6g}" for name, value in fields.items())

    def _measure(self) -> None:
        now, models = self._clock(), self._models.values()
        self._utilisation.set(max(((active + queued) / slots for slots, active, queued in models), default=0.0), now)
        self._active.set(sum(active for _, active, _ in models), now)
        self._queued.set(sum(queued for _, _, queued in models), now)

    def _report(self) -> orca_pb2.LoadReport:
        with self._lock:
            now = self._clock()
            return orca_pb2.LoadReport(
                rps_fractional=self._calls.at(now),
                eps=self._errors.at(now),
                named_metrics={"active_slots": self._active.at(now), "queue_length": self._queued.at(now)},
                application_utilization=self._utilisation.at(now),
            )
