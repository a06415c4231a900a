"""Requests on their way into a slot: what is large of theirs (a prompt's KV cache) is copied there by the part, while
others run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend
from beamline.serving.engine.prefill import Ready
from beamline.serving.engine.request import Request


@dataclass(slots=True)
class _Filling:
    """The first of them, of which some entries stand in a slot already."""

    request: Request
    slot: int
    parts: Iterator[None]


class Placement:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ready: deque[Ready] = deque()
        self._filling: _Filling | None = None

    @property
    def requests(self) -> list[Request]:
        return [each.request for each in self._ready]

    @property
    def rows(self) -> int:
        """How many slots, from the first, have to be kept for them."""
        return 0 if self._filling is None else self._filling.slot + 1

    def add(self, ready: Sequence[Ready]) -> None:
        self._ready.extend(ready)

    def keep(self, wanted: Callable[[Request], bool]) -> None:
        """The others have left."""
        self._ready = deque(each for each in self._ready if wanted(each.request))
        if self._filling is not None and not wanted(self._filling.request):
            self._filling = None

    def next(self, slot: int, others_run: bool) -> Ready | None:
        """The first of them, when all of it stands in this slot. While others run, they have a step between two
        parts."""
        if not self._ready:
            return None
        if self._filling is None:
            request = self._ready[0].request
            self._filling = _Filling(request, slot, self._backend.fill(slot, self._ready[0].memory))
        for _ in self._filling.parts:
            if others_run:
                return None
        if self._filling.slot != slot:  # somebody has left since it began
            self._backend.move(self._filling.slot, slot)
        self._filling = None
        return self._ready.popleft()
