"""Totals of a served version since it was loaded: what ModelStatistics of the open inference API returns."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from beamline.serving.contract.stats import Outcome, StepStats


@dataclass(frozen=True, slots=True)
class Total:
    count: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float, count: int = 1) -> Total:
        return Total(self.count + count, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Totals:
    """A request is one text, or one part of a text that was split."""

    success: Total = Total()
    failure: Total = Total()
    cancelled: Total = Total()
    queue: Total = Total()  # from submission to a slot
    reading: Total = Total()  # the host's work before a call's requests are submitted, of answered calls
    compute: Total = Total()  # from the slot to the result
    writing: Total = Total()  # the host's work after their results, of answered calls
    last_request: float = 0.0  # seconds since the epoch
    batches: dict[int, Total] = field(default_factory=dict)  # by size: steps, and the time they took


class Statistics:
    """Thread-safe: it is fed by the engine's thread and by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._batches: dict[int, Total] = {}

    def observe(self, step: StepStats) -> None:
        with self._lock:
            if step.active:  # a model that classifies or embeds has no decoder
                seconds = step.decode_seconds if step.beam_width else step.encode_seconds
                self._batches[step.active] = self._batches.get(step.active, Total()).plus(seconds)
            totals = self._totals
            for finished in step.finished:
                if finished.outcome is Outcome.OK:
                    totals = replace(
                        totals,
                        success=totals.success.plus(finished.total_seconds),
                        queue=totals.queue.plus(finished.queue_seconds),
                        compute=totals.compute.plus(finished.total_seconds - finished.queue_seconds),
                    )
                elif finished.outcome is Outcome.CANCELLED:
                    totals = replace(totals, cancelled=totals.cancelled.plus(finished.total_seconds))
                else:
                    totals = replace(totals, failure=totals.failure.plus(finished.total_seconds))
            if step.finished:
                totals = replace(totals, last_request=time.time())
            self._totals = totals

    def host_worked(self, reading: float, writing: float, requests: int) -> None:
        """Adds the seconds that the host worked for one call."""
        with self._lock:
            self._totals = replace(
                self._totals,
                reading=self._totals.reading.plus(reading, requests),
                writing=self._totals.writing.plus(writing, requests),
            )

    def totals(self) -> Totals:
        with self._lock:
            return replace(self._totals, batches=dict(self._batches))
