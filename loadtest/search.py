"""The highest rate that still holds a limit: doubled until it fails, then narrowed, then confirmed.

It knows nothing of requests: `measure` runs a stage at a rate and says how it went.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    holds: bool
    client_saturated: bool = False  # it says nothing about the server then
    abandoned: bool = False  # interrupted, or the server is lost: no further stage makes sense


@dataclass(frozen=True, slots=True)
class Found:
    rate: float | None
    limited_by_client: bool = False
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    first: float
    largest: float
    precision: float = 0.05  # two rates that differ by less are the same
    stages: int = 20  # at most
    smallest: float = 0.1


def highest_rate(measure: Callable[[float], Verdict], bounds: Bounds) -> Found:
    return _Search(measure, bounds).run()


class _Search:
    def __init__(self, measure: Callable[[float], Verdict], bounds: Bounds) -> None:
        self._measure = measure
        self._bounds = bounds
        self._held: dict[float, int] = {}  # how many times
        self._failed = float("inf")  # the lowest rate that failed
        self._left = bounds.stages
        self._limited = False

    def run(self) -> Found:
        rate = self._bounds.first
        while self._left:
            self._left -= 1
            verdict = self._measure(rate)
            if verdict.abandoned:
                break
            if verdict.holds:
                self._held[rate] = self._held.get(rate, 0) + 1
            else:
                # A client that is too slow is a wall as well, only not the server's.
                self._limited = verdict.client_saturated
                self._failed = rate
                self._held = {held: times for held, times in self._held.items() if held < rate}
            following = self._next()
            if following is None:
                break
            rate = following
        best = max(self._held, default=None)
        return Found(best, self._limited, best is not None and best >= self._bounds.largest)

    def _next(self) -> float | None:
        best = max(self._held, default=None)
        if best is None:
            lower = self._failed / 2
            return lower if lower >= self._bounds.smallest else None
        if self._failed == float("inf"):
            if best < self._bounds.largest:
                return min(2 * best, self._bounds.largest)
        elif self._failed / best > 1 + self._bounds.precision:
            return float((self._failed * best) ** 0.5)
        # Once may have been luck.
        return best if self._held[best] < 2 else None
