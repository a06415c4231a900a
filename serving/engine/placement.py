"""Requests on their way into a slot: what is large of theirs (a prompt's KV cache) is copied there by the part, while
others run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from beamline.serving.contract.backend import Backend
from beamline.serving.engine.request import Request


class Placement:
    """`requests` are those that have their memory, and wait for a slot."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.requests: list[Request] = []
        # Of the first of them: the slot in which some of its entries stand already, and the copies that are left.
        self._slot = -1
        self._parts: Iterator[None] | None = None

    @property
    def rows(self) -> int:
        """How many slots, from the first, have to be kept for them."""
        return 0 if self._parts is None else self._slot + 1

    def add(self, ready: Sequence[Request]) -> None:
        self.requests += ready

    def keep(self, wanted: Callable[[Request], bool]) -> None:
        """The others have left."""
        if self.requests and not wanted(self.requests[0]):
            self._parts = None
        self.requests = [request for request in self.requests if wanted(request)]

    def next(self, slot: int, others_run: bool) -> Request | None:
        """The first of them, when all of it stands in this slot. While others run, they have a step between two
        parts."""
        if not self.requests:
            return None
        if self._parts is None:
            self._slot, self._parts = slot, self._backend.fill(slot, self.requests[0].memory)
        for _ in self._parts:
            if others_run:
                return None
        if self._slot != slot:  # somebody has left since it began
            self._backend.move(self._slot, slot)
        self._parts = None
        return self.requests.pop(0)
