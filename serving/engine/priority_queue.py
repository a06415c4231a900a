"""Requests in the order in which they are to be served. It knows no clock: a request says when it came.

Urgency ages: every level of priority is worth `aging_seconds` of waiting. So the order is fixed at arrival (by when a
request came plus its level's handicap), and nobody is overtaken by one who came later than three such spans.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Protocol, TypeVar

AGING_SECONDS = 2.0


class Prioritized(Protocol):
    @property
    def id(self) -> Hashable: ...

    @property
    def submitted(self) -> float: ...

    @property
    def priority(self) -> int: ...  # 0 is most urgent


R = TypeVar("R", bound=Prioritized)


class PriorityQueue(MutableMapping[Hashable, R]):
    """By id; iterates in the order in which they are to be served."""

    def __init__(self, aging_seconds: float = AGING_SECONDS) -> None:
        self._aging = aging_seconds
        self._by_id: dict[Hashable, tuple[float, int, R]] = {}
        self._order: list[tuple[float, int, Hashable]] = []
        self._arrivals = 0

    def __setitem__(self, key: Hashable, request: R) -> None:
        if key in self._by_id:
            del self[key]
        rank = request.submitted + self._aging * request.priority
        self._arrivals += 1
        self._by_id[key] = (rank, self._arrivals, request)
        insort(self._order, (rank, self._arrivals, key))

    def __getitem__(self, key: Hashable) -> R:
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

    def popitem(self, last: bool = False) -> tuple[Hashable, R]:
        key = self._order[-1 if last else 0][2]
        request = self[key]
        del self[key]
        return key, request
