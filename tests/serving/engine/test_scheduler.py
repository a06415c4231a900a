"""The scheduler alone, in microseconds: no tensors, no model, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.admission import Admission
from beamline.serving.engine.queue import WorkQueue
from beamline.serving.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Job:
    id: int
    deadline: float | None = None
    queue_deadline: float | None = None
    submitted: float = 0.0
    priority: int = 1


class Bench(Scheduler[Job]):
    """The scheduler with its queue."""

    def __init__(self, slots: int) -> None:
        self.queue: WorkQueue[Job] = WorkQueue(Admission("tiny", slots, 10_000))
        super().__init__(self.queue, slots)

    def submit(self, job: Job) -> None:
        self.queue.submit(job, job.submitted)


def test_first_come_first_served() -> None:
    scheduler = Bench(slots=2)
    jobs = [Job(number) for number in range(4)]
    for job in jobs:
        scheduler.submit(job)
    assert scheduler.admit() == jobs[:2]
    assert [scheduler.start(job) for job in jobs[:2]] == [0, 1]
    assert scheduler.admit() == []
    assert scheduler.release(0) == 1
    assert scheduler.active == [jobs[1]]
    assert scheduler.admit() == [jobs[2]]


def test_nobody_overtakes_one_who_does_not_fit() -> None:
    scheduler = Bench(slots=4)
    for number in range(4):
        scheduler.submit(Job(number))
    assert [job.id for job in scheduler.admit(lambda job: job.id != 2)] == [0, 1]
    assert scheduler.queue.waiting == 2


def test_sweep_says_who_and_why() -> None:
    scheduler = Bench(slots=2)
    running, waiting, late = Job(1), Job(2), Job(3, deadline=5.0)
    scheduler.submit(running)
    for job in scheduler.admit():
        scheduler.start(job)
    scheduler.submit(waiting)
    scheduler.submit(late)
    scheduler.queue.cancel(1)
    scheduler.queue.cancel(2)
    scheduler.queue.cancel(99)
    dropped = scheduler.sweep(now=5.0)
    assert {(d.request.id, d.outcome, d.slot) for d in dropped} == {
        (1, Outcome.CANCELLED, 0),
        (2, Outcome.CANCELLED, None),
        (3, Outcome.DEADLINE, None),
    }
    assert scheduler.queue.waiting == 0


def test_only_the_wait_for_a_slot_times_out() -> None:
    scheduler = Bench(slots=1)
    running, waiting = Job(1, queue_deadline=5.0), Job(2, queue_deadline=5.0)
    scheduler.submit(running)
    scheduler.submit(waiting)
    for job in scheduler.admit():
        scheduler.start(job)
    assert scheduler.sweep(now=4.9) == []
    assert [(d.request, d.outcome, d.slot) for d in scheduler.sweep(now=5.0)] == [
        (waiting, Outcome.QUEUE_TIMEOUT, None)
    ]
    assert scheduler.active == [running]


def test_the_urgent_go_first() -> None:
    scheduler = Bench(slots=2)
    for number, priority in enumerate((3, 1, 0, 2)):
        scheduler.submit(Job(number, priority=priority))
    assert [job.id for job in scheduler.admit()] == [2, 1]


def test_only_who_was_taken_in_line_can_start() -> None:
    scheduler = Bench(slots=1)
    scheduler.submit(Job(1))
    with pytest.raises(ValueError, match="in preparation"):
        scheduler.start(Job(1))


def test_a_slot_is_kept_for_whoever_is_prepared() -> None:
    scheduler = Bench(slots=2)
    for number in range(3):
        scheduler.submit(Job(number))
    first, second = scheduler.admit()
    assert scheduler.start(second) == 0  # preparation may end in any order
    assert scheduler.admit() == []
    scheduler.queue.cancel(first.id)
    assert [(d.request, d.slot) for d in scheduler.sweep(0.0)] == [(first, None)]
    assert not scheduler.is_preparing(first)
    assert [job.id for job in scheduler.admit()] == [2]


class SchedulerMachine(RuleBasedStateMachine):
    """Random joins, cancels, deadlines and failures. Every request is answered exactly once, no slot leaks, and those
    who are admitted are admitted in the order in which they came."""

    @initialize(slots=st.integers(1, 6))
    def begin(self, slots: int) -> None:
        self.scheduler = Bench(slots)
        self.now = 0.0
        self.submitted: list[Job] = []
        self.answered: dict[int, str] = {}
        self.admitted: list[int] = []
        self.expected_slots: list[int] = []  # what a device would hold, by slot
        self.preparing: list[Job] = []

    def answer(self, job: Job, why: str) -> None:
        assert job.id not in self.answered, "answered twice"
        self.answered[job.id] = why

    def free(self, slot: int) -> None:
        moved = self.scheduler.release(slot)
        if moved is None:
            assert slot == len(self.expected_slots) - 1
        else:
            assert moved == len(self.expected_slots) - 1
            self.expected_slots[slot] = self.expected_slots[moved]
        self.expected_slots.pop()

    @rule(patience=st.one_of(st.none(), st.floats(0.1, 5)), queue_patience=st.one_of(st.none(), st.floats(0.1, 5)))
    def submit(self, patience: float | None, queue_patience: float | None) -> None:
        deadline, queue_deadline = (None if span is None else self.now + span for span in (patience, queue_patience))
        job = Job(len(self.submitted), deadline, queue_deadline, self.now)
        self.submitted.append(job)
        self.scheduler.submit(job)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.queue.cancel(data.draw(st.sampled_from(self.submitted)).id)

    @rule(seconds=st.floats(0, 2), budget=st.integers(1, 4), data=st.data())
    def step(self, seconds: float, budget: int, data: st.DataObject) -> None:
        self.now += seconds
        for dropped in self.scheduler.sweep(self.now):
            self.answer(dropped.request, dropped.outcome.value)
            if dropped.slot is not None:
                assert self.expected_slots[dropped.slot] == dropped.request.id
                self.free(dropped.slot)
        room = iter(range(budget))
        for job in self.scheduler.admit(lambda job: next(room, None) is not None):
            self.admitted.append(job.id)
            self.preparing.append(job)
        self.preparing = [job for job in self.preparing if self.scheduler.is_preparing(job)]
        for job in list(self.preparing):
            fate = data.draw(st.sampled_from(["later", "start", "fail"]))
            if fate == "later":
                continue
            self.preparing.remove(job)
            if fate == "fail":
                self.scheduler.give_up(job)
                self.answer(job, "failed")
            else:
                assert self.scheduler.start(job) == len(self.expected_slots)
                self.expected_slots.append(job.id)
        for slot in reversed(range(len(self.expected_slots))):
            if data.draw(st.booleans()):
                self.answer(self.scheduler.active[slot], "done")
                self.free(slot)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        inside = self.scheduler.queue.waiting + len(self.scheduler.preparing) + len(self.scheduler.active)
        assert inside + len(self.answered) == len(self.submitted)

    @invariant()
    def slots_are_dense_and_known(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert [job.id for job in self.scheduler.active] == self.expected_slots
        assert len(self.expected_slots) + len(self.scheduler.preparing) <= self.scheduler.slots

    @invariant()
    def first_come_first_served(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.admitted == sorted(self.admitted)

    def teardown(self) -> None:
        """Left alone, everybody is answered."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(len(self.submitted) + 1):
            for dropped in self.scheduler.sweep(self.now):
                self.answer(dropped.request, dropped.outcome.value)
                if dropped.slot is not None:
                    self.free(dropped.slot)
            self.preparing = [job for job in self.preparing if self.scheduler.is_preparing(job)]
            for job in [*self.preparing, *self.scheduler.admit()]:
                self.scheduler.start(job)
                self.expected_slots.append(job.id)
            for slot in reversed(range(len(self.expected_slots))):
                self.answer(self.scheduler.active[slot], "done")
                self.free(slot)
        assert set(self.answered) == {job.id for job in self.submitted}


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)
