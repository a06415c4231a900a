"""The last ten minutes of every model, in memory: a second consumer of `StepStats`, which needs no Prometheus.

Time is cut into bins. An engine that is idle makes no steps, so a bin that is missing means that nothing happened.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from beamline.serving.contract.stats import Outcome, StepStats

BIN_SECONDS = 2.0
BINS = 300
_SMOOTHED = 5  # bins that a percentile looks back: ten seconds
_KEPT_FINISHED = 2000  # stays in slots that the timeline remembers
_FASTEST, _STEP, _BUCKETS = 0.001, 1.2, 70  # latencies from a millisecond to five minutes, within a tenth
_STATM = Path("/proc/self/statm")


@dataclass(slots=True)
class _Bin:
    number: int
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    active: int = 0  # the most at once
    all_active: int = 0  # over all steps
    queued: int = 0
    memory: int = 0  # bytes of the process, when the bin began
    latencies: dict[int, int] = field(default_factory=dict)  # bucket -> requests


@dataclass(frozen=True, slots=True)
class Point:
    """One bin. Latencies, in seconds, are of the last ten seconds; None where no request was answered."""

    seconds_ago: float
    requests: int
    failed: int
    tokens: int
    steps: int
    step_seconds: float
    active: int
    mean_active: float
    queued: int
    memory: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A request in a slot: `began` and `ended` on `time.monotonic()`. Where it moved, one for each slot it had."""

    slot: int
    began: float
    ended: float
    tokens: int
    outcome: Outcome


class ModelHistory:
    """Written by the engines' threads, read by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bins: deque[_Bin] = deque(maxlen=BINS)
        self._finished: deque[Occupancy] = deque(maxlen=_KEPT_FINISHED)

    def observe(self, step: StepStats) -> None:
        now = self._clock()
        with self._lock:
            current = self._bin(int(now / BIN_SECONDS))
            current.steps += 1 if step.active else 0
            current.step_seconds += step.step_seconds if step.active else 0.0
            current.active = max(current.active, step.active)
            current.all_active += step.active
            current.queued = max(current.queued, step.queued)
            for each in step.finished:
                current.requests += 1
                current.failed += each.outcome is not Outcome.OK
                current.tokens += each.target_tokens
                bucket = _bucket(each.total_seconds)
                current.latencies[bucket] = current.latencies.get(bucket, 0) + 1
                ended = now
                for stay in reversed(each.stays):
                    began = ended - stay.seconds
                    self._finished.append(Occupancy(stay.slot, began, ended, each.target_tokens, each.outcome))
                    ended = began

    def _bin(self, number: int) -> _Bin:
        if not self._bins or self._bins[-1].number < number:
            self._bins.append(_Bin(number, memory=resident_bytes()))
        return self._bins[-1]

    def points(self) -> list[Point]:
        """Oldest first; only bins in which something happened."""
        now = self._clock()
        oldest = int(now / BIN_SECONDS) - BINS
        with self._lock:
            bins = [each for each in self._bins if each.number > oldest]
            return [self._point(bins, place, now) for place in range(len(bins))]

    def _point(self, bins: list[_Bin], place: int, now: float) -> Point:
        this = bins[place]
        latencies: dict[int, int] = {}
        for each in bins[max(0, place - _SMOOTHED + 1) : place + 1]:
            if each.number > this.number - _SMOOTHED:
                for bucket, count in each.latencies.items():
                    latencies[bucket] = latencies.get(bucket, 0) + count
        return Point(
            now - this.number * BIN_SECONDS,
            this.requests,
            this.failed,
            this.tokens,
            this.steps,
            this.step_seconds,
            this.active,
            this.all_active / max(1, this.steps),
            this.queued,
            this.memory,
            *(_percentile(latencies, share) for share in (0.5, 0.95, 0.99)),
        )

    def finished(self, seconds: float) -> list[Occupancy]:
        """Those that ended within the last so many seconds."""
        since = self._clock() - seconds
        with self._lock:
            return [each for each in self._finished if each.ended >= since]


class History:
    def __init__(self) -> None:
        self.models: dict[str, ModelHistory] = {}  # by the label of its metrics

    def of(self, label: str) -> ModelHistory:
        """A reloaded model goes on with what it had."""
        return self.models.setdefault(label, ModelHistory())


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _bucket(seconds: float) -> int:
    if seconds <= _FASTEST:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(seconds / _FASTEST, _STEP)))


def _percentile(latencies: dict[int, int], share: float) -> float | None:
    """The middle of the bucket in which that share is reached."""
    wanted = share * sum(latencies.values())
    reached = 0
    for bucket in sorted(latencies):
        reached += latencies[bucket]
        if reached >= wanted:
            return float(_FASTEST * _STEP ** (bucket - 0.5))
    return None
