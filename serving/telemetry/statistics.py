"""What a served version has done since it was loaded: the numbers behind the open inference door's ModelStatistics."""

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
    reading: Total = Total()  # the host's work before a call's requests are submitted ...
    compute: Total = Total()  # from the slot to the answer
    writing: Total = Total()  # ... and behind their answers, of answered calls
    last_request: float = 0.0  # seconds since the epoch
    batches: dict[int, Total] = field(default_factory=dict)  # by size: steps, and the time they took


class Statistics:
    """Fed on the engine's thread and on the event loop, read on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._batches: dict[int, Total] = {}

    def observe(self, step: StepStats) -> None:
        with self._lock:
            if step.active:  # who only reads is done when it is encoded
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
        """For one call, in seconds."""
        with self._lock:
            self._totals = replace(
                self._totals,
                reading=self._totals.reading.plus(reading, requests),
                writing=self._totals.writing.plus(writing, requests),
            )

    def totals(self) -> Totals:
        with self._lock:
            return replace(self._totals, batches=dict(self._batches))
