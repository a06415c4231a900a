"""The work queue of an engine: who waits, in which order, for how long, and who may join.

One kind for all work: decoding, scoring and pooled models. Priorities, admission, deadlines and cancellation live here.
It knows no tensors and no model; time is what it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.admission import Admission
from beamline.serving.engine.priority_queue import PriorityQueue
from beamline.serving.errors import BeamlineError, Cancelled, DeadlinePassed, Overloaded, ShuttingDown


class Queueable(Protocol):
    @property
    def id(self) -> Hashable: ...

    @property
    def submitted(self) -> float: ...

    @property
    def priority(self) -> int: ...

    @property
    def deadline(self) -> float | None: ...

    @property
    def queue_deadline(self) -> float | None: ...  # by when it must have left the queue


R = TypeVar("R", bound=Queueable)


@dataclass(frozen=True, slots=True)
class Dropped(Generic[R]):
    """A request that will not go on. `slot` is where it ran, and must be released; None if it had none yet."""

    request: R
    outcome: Outcome
    slot: int | None = None

    def error(self) -> BeamlineError:
        if self.outcome is Outcome.CANCELLED:
            return Cancelled("cancelled by the client")
        if self.outcome is Outcome.DEADLINE:
            return DeadlinePassed("the deadline is over")
        return Overloaded("no slot was free within the call's queue timeout; try again later, or allow more")


def reason_to_drop(request: R, now: float, cancelled: set[Hashable]) -> Outcome | None:
    if request.id in cancelled:
        return Outcome.CANCELLED
    if request.deadline is not None and now >= request.deadline:
        return Outcome.DEADLINE
    return None


class WorkQueue(Generic[R]):
    """`submit`, `cancel`, `stop`, `close`, `waiting` and `busy` may be used from any thread; the rest is the
    engine's."""

    def __init__(self, admission: Admission) -> None:
        self._lock = threading.Lock()  # around admission, and what other threads leave here
        self._admission = admission
        self._arrived: list[R] = []
        self._cancelled: set[Hashable] = set()
        self._stopped: list[tuple[Hashable, int]] = []
        self._closed = False
        self._waiting: PriorityQueue[R] = PriorityQueue()

    # -- from any thread -----------------------------------------------------------------------------------------

    def submit(self, request: R, now: float, active: int = 0) -> None:
        """Raises `Overloaded`, or `ShuttingDown` once it is closed. `active` are the slots in use."""
        seconds_left = None if request.deadline is None else request.deadline - now
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down; try another one")
            self._admission.enter(request.priority, seconds_left, active)
            self._arrived.append(request)

    def cancel(self, request_id: Hashable) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def stop(self, request_id: Hashable, index: int) -> None:
        """No more is wanted of one hypothesis of a request."""
        with self._lock:
            self._stopped.append((request_id, index))

    def close(self) -> None:
        """Refuses new requests from now on."""
        with self._lock:
            self._closed = True

    @property
    def waiting(self) -> int:
        with self._lock:
            return self._admission.waiting

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do here: requests that wait, or cancellations."""
        with self._lock:
            return bool(self._cancelled or self._admission.waiting)

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def take_cancelled(self) -> set[Hashable]:
        """The ids that were cancelled since the last time, wherever those requests are now."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def take_stopped(self) -> list[tuple[Hashable, int]]:
        with self._lock:
            stopped, self._stopped = self._stopped, []
        return stopped

    def sweep(self, now: float, cancelled: set[Hashable]) -> list[Dropped[R]]:
        """Those who wait and were cancelled, or have waited too long. They are gone from here."""
        self._sort_in()
        dropped = []
        for request in list(self._waiting.values()):
            outcome = reason_to_drop(request, now, cancelled)
            if outcome is None and request.queue_deadline is not None and now >= request.queue_deadline:
                outcome = Outcome.QUEUE_TIMEOUT
            if outcome is not None:
                del self._waiting[request.id]
                dropped.append(Dropped(request, outcome))
        self._left([each.request for each in dropped])
        return dropped

    def pop(self, most: int, fits: Callable[[R], bool] = lambda request: True) -> list[R]:
        """Takes at most so many, most urgent first, up to the first one that does not fit."""
        self._sort_in()
        taken: list[R] = []
        while self._waiting and len(taken) < most and fits(next(iter(self._waiting.values()))):
            taken.append(self._waiting.popitem(last=False)[1])
        self._left(taken)
        return taken

    def pop_batch(self, most: int, length: Callable[[R], int], most_tokens: int) -> list[R]:
        """As many as one padded run holds; the first one always fits."""
        longest = count = 0

        def fits(request: R) -> bool:
            nonlocal longest, count
            longest, count = max(longest, length(request)), count + 1
            return count == 1 or longest * count <= most_tokens

        return self.pop(most, fits)

    def served(self, seconds: float) -> None:
        """How long a request was worked for: what newcomers can expect is estimated from it."""
        with self._lock:
            self._admission.served(seconds)

    def _sort_in(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for request in arrived:
            self._waiting[request.id] = request

    def _left(self, requests: list[R]) -> None:
        with self._lock:
            for request in requests:
                self._admission.leave(request.priority)
