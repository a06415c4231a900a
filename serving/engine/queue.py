"""What other threads hand to an engine, and its own thread takes in between two steps. One lock is around all of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from beamline.serving.engine.admission import Admission
from beamline.serving.errors import ShuttingDown


class Waiting(Protocol):
    """What is asked of a request that wants to wait here."""

    @property
    def priority(self) -> int: ...

    @property
    def deadline(self) -> float | None: ...


Item = TypeVar("Item", bound=Waiting)


@dataclass(slots=True)
class Post(Generic[Item]):
    """Since it was last taken: who came, who is not wanted any more, and of whom enough was seen (which hypothesis)."""

    arrived: list[Item] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    enough: list[tuple[int, int]] = field(default_factory=list)


class Inbox(Generic[Item]):
    """Every method may be called from any thread. A request counts as waiting until it is said to have `left`."""

    def __init__(self, admission: Admission) -> None:
        self._lock = threading.Lock()
        self._admission = admission
        self._post: Post[Item] = Post()
        self._closed = False

    # -- for those who hand something over -----------------------------------------------------------------------

    def submit(self, item: Item, now: float, active: int = 0) -> None:
        """Raises `Overloaded`, or `ShuttingDown` once it is closed. `active` are the slots in use."""
        seconds_left = None if item.deadline is None else item.deadline - now
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is shutting down; try another one")
            self._admission.enter(item.priority, seconds_left, active)
            self._post.arrived.append(item)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._post.cancelled.append(request_id)

    def enough(self, request_id: int, index: int) -> None:
        with self._lock:
            self._post.enough.append((request_id, index))

    def close(self) -> None:
        """Nobody comes in any more."""
        with self._lock:
            self._closed = True

    # -- for the engine ------------------------------------------------------------------------------------------

    def take(self) -> Post[Item]:
        with self._lock:
            post, self._post = self._post, Post()
        return post

    def left(self, items: Sequence[Item]) -> None:
        """They wait no longer."""
        with self._lock:
            for item in items:
                self._admission.leave(item.priority)

    def served(self, seconds: float) -> None:
        """How long a request was worked for: what newcomers are told is estimated from it."""
        with self._lock:
            self._admission.served(seconds)

    @property
    def waiting(self) -> int:
        with self._lock:
            return self._admission.waiting

    @property
    def busy(self) -> bool:
        """Is there something to take, or somebody who waits?"""
        with self._lock:
            return bool(self._post.cancelled or self._admission.waiting)
