"""Whose step is next, where several models share a device: who has used least of its time.

A model that was idle comes back level with the one that is furthest behind: it is owed nothing for its absence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

E = TypeVar("E")

_LEAST = 1e-6  # seconds; a step that takes no time still counts as a turn


class FairShare(Generic[E]):
    def __init__(self) -> None:
        self._used: WeakKeyDictionary[E, float] = WeakKeyDictionary()  # of those that are unloaded, nothing is kept
        self._busy: set[int] = set()

    def next(self, busy: Sequence[E]) -> E:
        """One of those that have work. There must be one."""
        staying = [self._used[each] for each in busy if id(each) in self._busy and each in self._used]
        floor = min(staying, default=max(self._used.values(), default=0.0))
        for each in busy:
            if id(each) not in self._busy:
                self._used[each] = max(floor, self._used.get(each, floor))
        self._busy = {id(each) for each in busy}
        return min(busy, key=lambda each: self._used[each])

    def charge(self, engine: E, seconds: float) -> None:
        self._used[engine] = self._used.get(engine, 0.0) + max(seconds, _LEAST)
