"""Who runs, and in which slot. It knows no tensors and no model; time is what it is given.

Invariants: active requests occupy slots 0..n-1 without a gap; a request is in exactly one place (the queue, in
preparation, active, or gone); the most urgent is taken from the queue first; for everyone in preparation (encoding or
prefill) a slot is kept free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic

from beamline.serving.engine.queue import Dropped, R, WorkQueue, reason_to_drop


class Scheduler(Generic[R]):
    def __init__(self, queue: WorkQueue[R], slots: int) -> None:
        self.slots = slots
        self._queue = queue
        self._preparing: dict[Hashable, R] = {}
        self._active: list[R] = []

    @property
    def preparing(self) -> list[R]:
        return list(self._preparing.values())

    @property
    def active(self) -> list[R]:
        """The running requests, by slot."""
        return self._active

    def sweep(self, now: float) -> list[Dropped[R]]:
        """Everyone who was cancelled or is past the deadline, wherever it is. Those without a slot are gone; the active
        ones are returned from the highest slot down, so that releasing them in this order never moves one of them."""
        cancelled = self._queue.take_cancelled()
        dropped = self._queue.sweep(now, cancelled)
        for request in self.preparing:
            if (outcome := reason_to_drop(request, now, cancelled)) is not None:
                del self._preparing[request.id]
                dropped.append(Dropped(request, outcome))
        last = len(self._active) - 1
        for place, request in enumerate(reversed(self._active)):
            if (outcome := reason_to_drop(request, now, cancelled)) is not None:
                dropped.append(Dropped(request, outcome, last - place))
        return dropped

    def admit(self, fits: Callable[[R], bool] = lambda request: True) -> list[R]:
        """Takes as many from the queue as there are free slots for, up to the first one that does not fit. They are in
        preparation from now on, until each is given to `start` or to `give_up`, now or many steps later."""
        free = self.slots - len(self._active) - len(self._preparing)
        taken = self._queue.pop(free, fits)
        self._preparing.update((request.id, request) for request in taken)
        return taken

    def peek(self, most: int | None = None) -> list[R]:
        """Who will be admitted next, as things stand: so many, or all who wait."""
        return self._queue.peek(most)

    def is_preparing(self, request: R) -> bool:
        """False once a sweep has dropped it."""
        return request.id in self._preparing

    def give_up(self, request: R) -> None:
        """Its preparation failed."""
        del self._preparing[request.id]

    def start(self, request: R) -> int:
        """The slot in which it runs from now on."""
        if request.id not in self._preparing:
            raise ValueError("only a request in preparation can start")
        del self._preparing[request.id]
        self._active.append(request)
        return len(self._active) - 1

    def slot_of(self, request: R, guess: int) -> int | None:
        """Where it runs: mostly where it did. None once it is gone."""
        if guess < len(self._active) and self._active[guess] is request:
            return guess
        return next((slot for slot, other in enumerate(self._active) if other is request), None)

    def release(self, slot: int) -> int | None:
        """Frees a slot. The last active slot moves into it, and is returned, unless it was the last one itself."""
        last = len(self._active) - 1
        moved = self._active.pop()
        if slot == last:
            return None
        self._active[slot] = moved
        return last
