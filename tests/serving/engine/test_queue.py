"""The work queue: what other threads submit, and its engine takes in order."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.queue import Admission, WorkQueue
from beamline.serving.errors import Cancelled, DeadlinePassed, Overloaded, ShuttingDown


@dataclass(frozen=True)
class Item:
    id: int
    priority: int = 1
    deadline: float | None = None
    queue_deadline: float | None = None
    submitted: float = 0.0
    length: int = 1

    @property
    def ends(self) -> list[float]:
        return [each for each in (self.deadline, self.queue_deadline, math.inf) if each is not None]


def work_queue(max_queue: int = 1000) -> WorkQueue[Item]:
    return WorkQueue(Admission("tiny", 1, max_queue))


def test_everything_is_taken_once_and_waits_until_then() -> None:
    queue = work_queue()
    assert not queue.busy
    items = [Item(number) for number in range(3)]
    for item in items:
        queue.submit(item, 0.0)
    queue.cancel(9)
    queue.stop(2, 0)
    assert (queue.take_cancelled(), queue.take_stopped()) == ({9}, [(2, 0)])
    assert (queue.take_cancelled(), queue.take_stopped()) == (set(), [])
    assert (queue.waiting, queue.busy) == (3, True)
    assert queue.pop(2) == items[:2]
    assert (queue.waiting, queue.pop(5)) == (1, items[2:])
    assert (queue.waiting, queue.busy, queue.pop(5)) == (0, False, [])
    queue.cancel(9)
    assert queue.busy  # there is something to take


_WHEN = st.none() | st.integers(0, 9).map(float)
_TURNS = st.tuples(st.sampled_from(["pop", "cancel", "sweep"]), st.none(), st.none())
_DOES = st.one_of(st.tuples(st.just("submit"), _WHEN, _WHEN), _TURNS)


@given(st.lists(_DOES, max_size=40))
def test_who_has_waited_too_long_leaves_at_the_next_sweep(does: list[tuple[str, float | None, float | None]]) -> None:
    """A second passes between two things that happen to it. A sweep finds whom a look at everybody would find."""
    queue, waiting = work_queue(), list[Item]()
    cancelled: set[Hashable] = set()
    for now, (what, deadline, queue_deadline) in enumerate(does):
        if what == "submit":
            item = Item(now, deadline=None if deadline is None else now + deadline, queue_deadline=queue_deadline)
            queue.submit(item, float(now))
            waiting.append(item)
        elif what == "cancel" and waiting:
            cancelled.add(waiting[0].id)
        elif what == "pop":
            waiting = waiting[len(queue.pop(1)) :]
        elif what == "sweep":
            late = [each for each in waiting if each.id in cancelled or min(each.ends) <= now]
            assert {dropped.request for dropped in queue.sweep(float(now), cancelled)} == set(late)
            waiting = [each for each in waiting if each not in late]
            cancelled = set()


def test_those_who_are_next_stay_in_the_queue() -> None:
    queue = work_queue()
    items = [Item(1), Item(2, priority=0), Item(3)]
    for item in items:
        queue.submit(item, 0.0)
    assert queue.peek(2) == [items[1], items[0]]
    assert queue.pop(5) == [items[1], items[0], items[2]]
    assert queue.peek(2) == []


def test_a_full_one_refuses_and_a_closed_one_too() -> None:
    queue = work_queue(max_queue=1)
    first = Item(1)
    queue.submit(first, 0.0)
    with pytest.raises(Overloaded, match="queue of tiny is full"):
        queue.submit(Item(2), 0.0)
    assert queue.pop(1) == [first]
    queue.served(10.0)
    with pytest.raises(Overloaded, match=r"deadline is in 5.00 s"):
        queue.submit(Item(3, deadline=105.0), 100.0, active=1)
    queue.close()
    with pytest.raises(ShuttingDown):
        queue.submit(Item(4), 0.0)
    assert (queue.pop(9), queue.waiting) == ([], 0)


def test_a_sweep_drops_who_was_cancelled_or_waited_too_long() -> None:
    queue = work_queue()
    stays, cancelled = Item(1, deadline=9.0), Item(2)
    late, impatient = Item(3, deadline=5.0), Item(4, queue_deadline=5.0)
    for item in (stays, cancelled, late, impatient):
        queue.submit(item, 0.0)
    queue.cancel(2)
    dropped = queue.sweep(5.0, queue.take_cancelled())
    assert [(each.request, each.outcome) for each in dropped] == [
        (cancelled, Outcome.CANCELLED),
        (late, Outcome.DEADLINE),
        (impatient, Outcome.QUEUE_TIMEOUT),
    ]
    assert [type(each.error()) for each in dropped] == [Cancelled, DeadlinePassed, Overloaded]
    assert (queue.waiting, queue.pop(9)) == (1, [stays])


def test_a_batch_holds_what_one_padded_run_does() -> None:
    queue = work_queue()
    items = [Item(number, length=length) for number, length in enumerate((900, 5, 5, 60, 5))]
    for item in items:
        queue.submit(item, 0.0)
    batches = []
    while queue.waiting:
        batches.append(queue.pop_batch(3, lambda item: item.length, 100))
    assert batches == [items[:1], items[1:3], items[3:4], items[4:]]


def test_nothing_is_lost_between_threads() -> None:
    queue, threads, each = work_queue(10_000), 8, 500
    over = threading.Event()
    taken: list[int] = []
    cancelled: list[Hashable] = []

    def hand_over(thread: int) -> None:
        for number in range(thread * each, (thread + 1) * each):
            queue.submit(Item(number), 0.0)
            queue.cancel(number)

    def take() -> None:
        last = False
        while not last:
            last = over.is_set()
            taken.extend(item.id for item in queue.pop(10_000))
            cancelled.extend(queue.take_cancelled())

    with ThreadPoolExecutor(threads + 1) as pool:
        taker = pool.submit(take)
        list(pool.map(hand_over, range(threads)))
        over.set()
        taker.result()
    assert sorted(taken) == sorted(cancelled) == list(range(threads * each))  # type: ignore[type-var]
    assert not queue.busy
