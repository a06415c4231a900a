"""The order of those who wait, against the plain rule: came when, plus a handicap for each level of priority."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.serving.engine.priority_queue import AGING_SECONDS, PriorityQueue


@dataclass(frozen=True)
class Job:
    id: int
    submitted: float
    priority: int


ARRIVALS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=40)


def jobs_of(arrivals: list[tuple[float, int]]) -> list[Job]:
    now, jobs = 0.0, []
    for number, (pause, priority) in enumerate(arrivals):
        now += pause
        jobs.append(Job(number, now, priority))
    return jobs


@given(arrivals=ARRIVALS, data=st.data())
@settings(max_examples=200)
def test_the_order_is_that_of_the_plain_rule(arrivals: list[tuple[float, int]], data: st.DataObject) -> None:
    line: PriorityQueue[Job] = PriorityQueue()
    waiting: list[Job] = []
    for job in jobs_of(arrivals):
        line[job.id] = job
        waiting.append(job)
        action = data.draw(st.sampled_from(["wait", "take", "drop"]))
        expected = sorted(waiting, key=lambda one: (one.submitted + AGING_SECONDS * one.priority, one.id))
        assert list(line.values()) == expected
        if action == "take":
            assert line.popitem() == (expected[0].id, expected[0])
            waiting.remove(expected[0])
        elif action == "drop":
            gone = data.draw(st.sampled_from(waiting))
            del line[gone.id]
            waiting.remove(gone)
            assert gone.id not in line
        assert len(line) == len(waiting)


@given(arrivals=ARRIVALS)
@settings(max_examples=100)
def test_nobody_is_overtaken_by_one_who_came_much_later(arrivals: list[tuple[float, int]]) -> None:
    line: PriorityQueue[Job] = PriorityQueue()
    jobs = jobs_of(arrivals)
    for job in jobs:
        line[job.id] = job
    order = {key: place for place, key in enumerate(line)}
    for early in jobs:
        for late in jobs:
            if late.submitted - early.submitted > 3 * AGING_SECONDS:
                assert order[early.id] < order[late.id]
            if early.submitted == late.submitted and early.priority < late.priority:
                assert order[early.id] < order[late.id]


def test_one_who_comes_again_stands_once() -> None:
    line: PriorityQueue[Job] = PriorityQueue()
    line[1] = Job(1, 0.0, 3)
    line[1] = Job(1, 5.0, 0)
    assert list(line.values()) == [Job(1, 5.0, 0)]
