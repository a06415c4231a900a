"""The queue of texts to be scored, without a model: what its waits say to those who come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from beamline.serving.contract.stats import Finished, Outcome
from beamline.serving.engine.queue import Admission
from beamline.serving.engine.request import OutputCollector, Request
from beamline.serving.engine.scoring import Scoring
from beamline.serving.errors import ComputeError, Overloaded


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A run takes a second, however many texts it has."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def score_batch(self, sources: Any, targets: Any, labels: Any) -> list[Any]:
        self._clock.now += 1
        return [np.zeros(len(each), np.float32) for each in labels]


def text(deadline: float | None = None, length: int = 400) -> Request:
    """So long that a run has two of them."""
    return Request(target=(5,) * length, labels=(6,) * length, deadline=deadline)


class Bench:
    def __init__(self, early_refusal: bool = True) -> None:
        self.clock = Clock()
        self.finished: list[Finished] = []
        self._outputs = OutputCollector(self.clock)
        admission = Admission("m (scoring)", 1, 6, early_refusal)
        device: Any = Device(self.clock)
        self._scoring = Scoring(device, admission, self._outputs, self.clock)

    def submit(self, request: Request) -> None:
        request.submitted = self.clock.now
        self._scoring.queue.submit(request, self.clock.now)

    def cancel(self, request: Request) -> None:
        self._scoring.queue.cancel(request.id)

    def fail_everything(self) -> None:
        self._scoring.fail_everything(ComputeError("the engine failed"))

    def advance(self, others_wait: bool) -> None:
        self._scoring.advance(others_wait)
        self.finished += self._outputs.take()[1]

    @property
    def waiting(self) -> int:
        return self._scoring.queue.waiting


def scoring(early_refusal: bool = True) -> tuple[Bench, Clock, list[Finished]]:
    bench = Bench(early_refusal)
    return bench, bench.clock, bench.finished


def test_a_deadline_that_would_pass_in_the_queue_is_refused_at_once() -> None:
    queue, clock, finished = scoring()
    for _ in range(4):
        queue.submit(text())
    queue.advance(others_wait=False)
    queue.advance(others_wait=False)
    assert (len(finished), clock.now) == (4, 102)  # half a second each
    queue.submit(text(clock.now + 0.1))  # nobody is before it
    for _ in range(3):
        queue.submit(text())
    with pytest.raises(Overloaded, match=r"the deadline is in 1\.00 s") as caught:
        queue.submit(text(clock.now + 1))
    assert caught.value.retry_after == pytest.approx(1.0)  # when half of the four are scored
    queue.submit(text(clock.now + 9))


def test_refusing_early_can_be_switched_off() -> None:
    queue, clock, _ = scoring(early_refusal=False)
    for _ in range(2):
        queue.submit(text())
    queue.advance(others_wait=False)
    for _ in range(6):
        queue.submit(text(clock.now + 0.1))
    with pytest.raises(Overloaded, match=r"the queue of m \(scoring\) is full \(6 waiting\)"):
        queue.submit(text())


def test_a_deadline_that_passes_in_the_queue() -> None:
    queue, clock, finished = scoring()
    queue.submit(text(clock.now + 3))
    clock.now += 4
    queue.advance(others_wait=True)
    assert [each.outcome for each in finished] == [Outcome.DEADLINE]
    assert queue.waiting == 0


def test_what_waits_beside_a_running_batch_counts_its_steps() -> None:
    """One text a step, and a step takes two seconds beside the text's own."""
    queue, clock, _ = scoring()
    for _ in range(6):
        queue.submit(text())
    for _ in range(5):
        queue.advance(others_wait=True)
        clock.now += 2
    queue.submit(text())
    with pytest.raises(Overloaded, match="would need about"):
        queue.submit(text(clock.now + 4))  # enough, if only the device's seconds counted


@pytest.mark.parametrize("leaves", ["cancelled", "late", "failed"])
def test_the_time_since_who_waited_has_left_is_nobodys_wait(leaves: str) -> None:
    """Ten minutes in which there was nothing to score are not what a text costs."""
    queue, clock, _ = scoring()
    waits = text(clock.now + 2)
    queue.submit(text())
    queue.submit(waits)
    queue.advance(others_wait=True)  # one of them
    if leaves == "cancelled":
        queue.cancel(waits)
        queue.advance(others_wait=True)
    elif leaves == "late":
        clock.now += 2
        queue.advance(others_wait=True)
    else:
        queue.fail_everything()
    assert queue.waiting == 0
    clock.now += 600
    queue.submit(text())
    queue.advance(others_wait=True)
    for _ in range(3):
        queue.submit(text(clock.now + 9))  # it was a second each
