"""The last ten minutes in memory, on a clock that the test moves."""

from __future__ import annotations

import pytest

from beamline.serving.contract.stats import Finished, Outcome, Stay, StepStats
from beamline.serving.telemetry.history import BIN_SECONDS, BINS, ModelHistory, resident_bytes


def step(active: int = 0, queued: int = 0, seconds: float = 0.01, finished: tuple[Finished, ...] = ()) -> StepStats:
    return StepStats(
        slots=4,
        active=active,
        remaining=active,
        queued=queued,
        decode_seconds=seconds,
        step_seconds=seconds,
        finished=finished,
    )


def answered(seconds: float, outcome: Outcome = Outcome.OK, stays: tuple[Stay, ...] = (Stay(2, 0.3),)) -> Finished:
    return Finished(outcome, seconds / 4, None, seconds, 5, 7, stays=stays)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bin_says_what_happened_in_it() -> None:
    clock = Clock()
    history = ModelHistory(clock)
    history.observe(step(active=3, queued=2, seconds=0.02))
    history.observe(step(active=1, seconds=0.04, finished=(answered(0.5), answered(0.1, Outcome.CANCELLED))))
    history.observe(step())  # an engine that only looked around
    (point,) = history.points()
    assert (point.requests, point.failed, point.tokens, point.steps) == (2, 1, 14, 2)
    assert (point.active, point.mean_active, point.queued) == (3, 2.0, 2)
    assert point.step_seconds == pytest.approx(0.06)
    assert point.memory > 1 << 20


def test_percentiles_are_within_a_tenth_and_look_back_ten_seconds() -> None:
    clock = Clock()
    history = ModelHistory(clock)
    for millisecond in range(1, 101):
        history.observe(step(finished=(answered(millisecond / 1000),)))
    (point,) = history.points()
    assert point.p50 == pytest.approx(0.05, rel=0.11)
    assert point.p95 == pytest.approx(0.095, rel=0.11)
    assert point.p99 == pytest.approx(0.099, rel=0.11)
    clock.now += 4 * BIN_SECONDS
    history.observe(step(active=1))
    assert history.points()[-1].p50 == point.p50
    clock.now += BIN_SECONDS
    history.observe(step(active=1))
    assert history.points()[-1].p50 is None


def test_memory_is_bounded_and_old_bins_are_forgotten() -> None:
    clock = Clock()
    history = ModelHistory(clock)
    for _ in range(2 * BINS):
        history.observe(step(active=1, finished=(answered(0.1),) * 10))
        clock.now += BIN_SECONDS
    assert len(history.points()) <= BINS
    assert len(history.finished(1e9)) == 2000
    clock.now += BINS * BIN_SECONDS
    assert history.points() == []


def test_the_timeline_knows_slots_and_times() -> None:
    clock = Clock()
    history = ModelHistory(clock)
    history.observe(step(finished=(answered(0.4), answered(0.1, stays=()))))  # the second never had a slot
    (one,) = history.finished(60)
    assert (one.slot, one.outcome, one.tokens) == (2, Outcome.OK, 7)
    assert one.ended - one.began == pytest.approx(0.3)  # without its time in the queue
    history.observe(step(finished=(answered(0.5, stays=(Stay(3, 0.25), Stay(1, 0.125))),)))  # it moved
    _, last, first = history.finished(60)
    assert [(each.slot, clock.now - each.began, clock.now - each.ended) for each in (first, last)] == [
        (3, 0.375, 0.125),
        (1, 0.125, 0.0),
    ]
    clock.now += 61
    assert history.finished(60) == []


def test_resident_memory_is_this_process() -> None:
    assert 1 << 20 < resident_bytes() < 1 << 40
