"""Who waits, who runs, and in which slot. It knows no tensors and no model; time is what it is told.

Invariants: active requests occupy slots 0..n-1 without a gap; a request is in exactly one place (waiting, in
preparation, active, or gone); whoever is first in line (see `line.py`: urgency, and age) is taken first; for everybody
in preparation a slot is kept free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from beamline.serving.engine.priority_queue import Line


class Schedulable(Protocol):
    @property
    def id(self) -> Hashable: ...

    @property
    def deadline(self) -> float | None: ...

    @property
    def submitted(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def queue_deadline(self) -> float | None: ...  # by when it must have a slot


R = TypeVar("R", bound=Schedulable)


class Reason(Enum):
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"


@dataclass(frozen=True, slots=True)
class Dropped(Generic[R]):
    """A request that will not go on. `slot` is where it ran, and must be released; None if it had none yet."""

    request: R
    reason: Reason
    slot: int | None
    waited: bool = False  # it was still in the queue


class Scheduler(Generic[R]):
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._waiting: Line[R] = Line()
        self._preparing: dict[Hashable, R] = {}
        self._active: list[R] = []
        self._cancelled: set[Hashable] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def preparing(self) -> int:
        return len(self._preparing)

    @property
    def active(self) -> list[R]:
        """The running requests, by slot."""
        return self._active

    def submit(self, request: R) -> None:
        self._waiting[request.id] = request

    def cancel(self, request_id: Hashable) -> None:
        """Takes effect at the next `sweep`; unknown and finished requests are ignored."""
        known = request_id in self._waiting or request_id in self._preparing
        if known or any(request.id == request_id for request in self._active):
            self._cancelled.add(request_id)

    def sweep(self, now: float) -> list[Dropped[R]]:
        """Everybody who was cancelled or is past the deadline. Those without a slot are gone; the active ones are
        returned from the highest slot down, so that releasing them in this order never moves one of them."""
        dropped = []
        for request in list(self._waiting.values()):
            if (reason := self._reason_to_drop(request, now)) is not None:
                del self._waiting[request.id]
                dropped.append(Dropped(request, reason, None, waited=True))
        for request in list(self._preparing.values()):
            if (reason := self._reason_to_drop(request, now)) is not None:
                del self._preparing[request.id]
                dropped.append(Dropped(request, reason, None))
        for slot in reversed(range(len(self._active))):
            request = self._active[slot]
            if (reason := self._reason_to_drop(request, now)) is not None:
                dropped.append(Dropped(request, reason, slot))
        self._cancelled.clear()
        return dropped

    def _reason_to_drop(self, request: R, now: float) -> Reason | None:
        if request.id in self._cancelled:
            return Reason.CANCELLED
        if request.deadline is not None and now >= request.deadline:
            return Reason.DEADLINE
        if request.queue_deadline is not None and now >= request.queue_deadline and request.id in self._waiting:
            return Reason.QUEUE_TIMEOUT
        return None

    def next_in_line(self, fits: Callable[[R], bool] = lambda request: True) -> list[R]:
        """Takes those for whom there is a free slot, first in line first, up to the first one that does not fit. They
        are in preparation from now on, until each is given to `start` or to `give_up`, now or many steps later."""
        taken: list[R] = []
        while self._waiting and len(self._active) + len(self._preparing) < self.slots:
            if not fits(next(iter(self._waiting.values()))):
                break
            request = self._waiting.popitem(last=False)[1]
            self._preparing[request.id] = request
            taken.append(request)
        return taken

    def take_together(self, length: Callable[[R], int], most_tokens: int, most: int | None = None) -> list[R]:
        """Takes, first in line first, as many as one padded run holds; the first one always fits. They never get a
        slot, because they are answered in this very step, and are gone from here."""
        longest = count = 0

        def fits(request: R) -> bool:
            nonlocal longest, count
            longest, count = max(longest, length(request)), count + 1
            return count == 1 or ((most is None or count <= most) and longest * count <= most_tokens)

        taken = self.next_in_line(fits)
        for request in taken:
            self.give_up(request)
        return taken

    def is_preparing(self, request: R) -> bool:
        """False once a sweep has dropped it."""
        return request.id in self._preparing

    def in_preparation(self) -> list[R]:
        return list(self._preparing.values())

    def give_up(self, request: R) -> None:
        """Its preparation failed."""
        del self._preparing[request.id]

    def give_up_all(self) -> list[R]:
        """Everybody in preparation is gone."""
        given_up = list(self._preparing.values())
        self._preparing.clear()
        return given_up

    def start(self, request: R) -> int:
        """The slot in which it runs from now on."""
        if request.id not in self._preparing:
            raise ValueError("only a request in preparation can start")
        del self._preparing[request.id]
        self._active.append(request)
        return len(self._active) - 1

    def release(self, slot: int) -> int | None:
        """Frees a slot. The last active slot moves into it, and is returned, unless it was the last one itself."""
        last = len(self._active) - 1
        moved = self._active.pop()
        if slot == last:
            return None
        self._active[slot] = moved
        return last
