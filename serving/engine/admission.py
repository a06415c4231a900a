"""Who may join the queue. Plain counting: it knows no tensors and no model, and time is what it is given.

An early refusal is cheap for everybody; a request that waits in vain costs its caller the wait and others their
place. So the queue has an end, and a request whose deadline would pass while it waits is not let in.
"""

from __future__ import annotations

from collections import Counter

from beamline.serving.errors import Overloaded

_WEIGHT = 0.1  # of the newest observation: the last ten or twenty requests count
_UNKNOWN = 1.0  # what to wait before trying again, where nothing was measured yet; seconds
_SHORTEST, _LONGEST = 0.05, 60.0


class Admission:
    """Not safe for threads: the queue's lock is around it."""

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
