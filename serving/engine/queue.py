"""The work queue of an engine: in which order requests wait, who may join, and for how long.

One kind for all work: decoding, scoring and pooled models. Priorities, admission, deadlines and cancellation live here.
It knows no tensors and no model; time is what it is given.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from beamline.serving.contract.stats import Outcome
from beamline.serving.errors import BeamlineError, Cancelled, DeadlinePassed, Overloaded, ShuttingDown

AGING_SECONDS = 2.0


class Prioritized(Protocol):
    @property
    def id(self) -> Hashable: ...

    @property
    def submitted(self) -> float: ...

    @property
    def priority(self) -> int: ...  # 0 is most urgent


P = TypeVar("P", bound=Prioritized)


class PriorityQueue(MutableMapping[Hashable, P]):
    """By id; iterates in the order in which they are to be served.

    Urgency ages: every level of priority is worth `aging_seconds` of waiting. So the order is fixed at arrival (by when
    a request came plus its level's handicap), and none is overtaken by one that came later than three such spans. It
    knows no clock: a request says when it came.
    """

    def __init__(self, aging_seconds: float = AGING_SECONDS) -> None:
        self._aging = aging_seconds
        self._by_id: dict[Hashable, tuple[float, int, P]] = {}
        self._order: list[tuple[float, int, Hashable]] = []
        self._arrivals = 0

    def __setitem__(self, key: Hashable, request: P) -> None:
        if key in self._by_id:
            del self[key]
        rank = request.submitted + self._aging * request.priority
        self._arrivals += 1
        self._by_id[key] = (rank, self._arrivals, request)
        insort(self._order, (rank, self._arrivals, key))

    def __getitem__(self, key: Hashable) -> P:
        return self._by_id[key][2]

    def __delitem__(self, key: Hashable) -> None:
        rank, arrival, _ = self._by_id.pop(key)
        del self._order[bisect_left(self._order, (rank, arrival))]  # arrivals are unique

    def __iter__(self) -> Iterator[Hashable]:
        return (key for _, _, key in self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._by_id

    def __len__(self) -> int:
        return len(self._order)

    def in_any_order(self) -> list[P]:
        """Sooner than in the order in which they are to be served."""
        return [request for _, _, request in self._by_id.values()]

    def popitem(self, last: bool = False) -> tuple[Hashable, P]:
        key = self._order[-1 if last else 0][2]
        request = self[key]
        del self[key]
        return key, request


_WEIGHT = 0.1  # of the newest observation: the last ten or twenty requests count
_UNKNOWN = 1.0  # what to wait before trying again, where nothing was measured yet; seconds
_SHORTEST, _LONGEST = 0.05, 60.0


class Admission:
    """Who may join. Plain counting, and not safe for threads: the queue's lock is around it.

    An early refusal is cheap for everybody; a request that waits in vain costs its caller the wait and others their
    place. So the queue has an end, and a request whose deadline would pass while it waits is not let in.
    """

    def __init__(self, model: str, slots: int, max_queue: int, early_refusal: bool = True) -> None:
        self._model = model
        self._slots = slots
        self._max_queue = max_queue
        self._early_refusal = early_refusal
        self._waiting: Counter[int] = Counter()  # by priority
        self._service: float | None = None  # seconds that a request keeps its slot, smoothed

    @property
    def waiting(self) -> int:
        return self._waiting.total()

    def enter(self, priority: int, seconds_left: float | None, active: int) -> None:
        """Raises `Overloaded`. `seconds_left` until the deadline, if there is one; `active` are the slots in use."""
        if self.waiting >= self._max_queue:
            raise Overloaded(
                f"the queue of {self._model} is full ({self._max_queue} waiting); try again later",
                self._retry_after(),
            )
        needed = self._needed(priority, active)
        if self._early_refusal and seconds_left is not None and needed is not None and needed > seconds_left:
            raise Overloaded(
                f"the deadline is in {seconds_left:.2f} s, but {self._model} would need about {needed:.2f} s, "
                "most of it waiting; try again later, or allow more time",
                self._retry_after(),
            )
        self._waiting[priority] += 1

    def leave(self, priority: int) -> None:
        self._waiting[priority] -= 1

    def served(self, seconds: float) -> None:
        """A request was answered, so long after it got its slot."""
        self._service = seconds if self._service is None else self._service + _WEIGHT * (seconds - self._service)

    def _needed(self, priority: int, active: int) -> float | None:
        """Until a newcomer is answered. None where it would not wait, or nothing was measured yet: an estimate from
        other requests is no reason to refuse one that gets a slot at once."""
        if self._service is None or self.waiting + active < self._slots:
            return None
        ahead = sum(count for other, count in self._waiting.items() if other <= priority)
        return self._service * ((ahead + 1) / self._slots + 1)

    def _retry_after(self) -> float:
        """When half of the queue will be gone."""
        if self._service is None:
            return _UNKNOWN
        return min(_LONGEST, max(_SHORTEST, self._service * self.waiting / self._slots / 2))


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


def _expires(request: Queueable) -> float:
    """When it will have waited too long."""
    return min(each for each in (request.deadline, request.queue_deadline, math.inf) if each is not None)


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
        self._expires = math.inf  # when the first of them will have waited too long, or sooner: it may be gone

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
        if now < self._expires and not cancelled:  # a step should not cost more because many wait
            return []
        dropped = []
        self._expires = math.inf
        for request in self._waiting.in_any_order():
            outcome = reason_to_drop(request, now, cancelled)
            if outcome is None and request.queue_deadline is not None and now >= request.queue_deadline:
                outcome = Outcome.QUEUE_TIMEOUT
            if outcome is None:
                self._expires = min(self._expires, _expires(request))
            else:
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

    def peek(self, most: int | None = None) -> list[R]:
        """Those who are next, as things stand: so many, or all. They stay here."""
        self._sort_in()
        return list(islice(self._waiting.values(), most))

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
            self._expires = min(self._expires, _expires(request))

    def _left(self, requests: list[R]) -> None:
        with self._lock:
            for request in requests:
                self._admission.leave(request.priority)
