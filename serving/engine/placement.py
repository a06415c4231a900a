"""Requests on their way into a slot: what is large of theirs is copied there by the part, while others run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from beamline.serving.contract.backend import Backend
from beamline.serving.engine.prefill import Ready
from beamline.serving.engine.sequence import Job


@dataclass(slots=True)
class _Filling:
    """The first in line, of whom some entries stand in a slot already."""

    job: Job
    slot: int
    parts: Iterator[None]


class Joining:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._line: deque[Ready] = deque()
        self._filling: _Filling | None = None

    @property
    def jobs(self) -> list[Job]:
        return [each.job for each in self._line]

    @property
    def rows(self) -> int:
        """How many slots, from the first, have to be kept for them."""
        return 0 if self._filling is None else self._filling.slot + 1

    def add(self, ready: Sequence[Ready]) -> None:
        self._line.extend(ready)

    def keep(self, wanted: Callable[[Job], bool]) -> None:
        """The others have left."""
        self._line = deque(each for each in self._line if wanted(each.job))
        if self._filling is not None and not wanted(self._filling.job):
            self._filling = None

    def next(self, slot: int, others_run: bool) -> Ready | None:
        """The first in line, when all of it stands in this slot. While others run, they have a step between two
        parts."""
        if not self._line:
            return None
        if self._filling is None:
            job = self._line[0].job
            self._filling = _Filling(job, slot, self._backend.fill(slot, self._line[0].memory))
        for _ in self._filling.parts:
            if others_run:
                return None
        if self._filling.slot != slot:  # somebody has left since it began
            self._backend.move(self._filling.slot, slot)
        self._filling = None
        return self._line.popleft()
