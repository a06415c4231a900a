"""What an engine is handed by other threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from beamline.serving.engine.admission import Admission
from beamline.serving.engine.queue import Inbox
from beamline.serving.errors import Overloaded, ShuttingDown


@dataclass(frozen=True)
class Item:
    id: int
    priority: int = 1
    deadline: float | None = None


def inbox(max_queue: int = 1000) -> Inbox[Item]:
    return Inbox(Admission("tiny", 1, max_queue))


def test_everything_is_taken_once_and_waits_until_it_has_left() -> None:
    box = inbox()
    assert not box.busy
    items = [Item(number) for number in range(3)]
    for item in items:
        box.submit(item, 0.0)
    box.cancel(1)
    box.enough(2, 0)
    post = box.take()
    assert (post.arrived, post.cancelled, post.enough) == (items, [1], [(2, 0)])
    assert (box.take().arrived, box.waiting, box.busy) == ([], 3, True)
    box.left(items)
    assert (box.waiting, box.busy) == (0, False)
    box.cancel(9)
    assert box.busy  # there is something to take


def test_a_full_one_refuses_and_a_closed_one_too() -> None:
    box = inbox(max_queue=1)
    first = Item(1)
    box.submit(first, 0.0)
    with pytest.raises(Overloaded, match="queue of tiny is full"):
        box.submit(Item(2), 0.0)
    assert box.take().arrived == [first]
    box.left([first])
    box.served(10.0)
    with pytest.raises(Overloaded, match=r"deadline is in 5.00 s"):
        box.submit(Item(3, deadline=105.0), 100.0, active=1)
    box.close()
    with pytest.raises(ShuttingDown):
        box.submit(Item(4), 0.0)
    assert (box.take().arrived, box.waiting) == ([], 0)


def test_nothing_is_lost_between_threads() -> None:
    box, threads, each = inbox(10_000), 8, 500
    over = threading.Event()
    taken: list[int] = []
    cancelled: list[int] = []

    def hand_over(thread: int) -> None:
        for number in range(thread * each, (thread + 1) * each):
            box.submit(Item(number), 0.0)
            box.cancel(number)

    def take() -> None:
        last = False
        while not last:
            last = over.is_set()
            post = box.take()
            box.left(post.arrived)
            taken.extend(item.id for item in post.arrived)
            cancelled.extend(post.cancelled)

    with ThreadPoolExecutor(threads + 1) as pool:
        taker = pool.submit(take)
        list(pool.map(hand_over, range(threads)))
        over.set()
        taker.result()
    assert sorted(taken) == sorted(cancelled) == list(range(threads * each))
    assert not box.busy
