"""The search for the highest rate that holds the SLO: doubled until it fails, then narrowed, then confirmed.

It knows nothing of requests: `measure` runs a stage at a rate and returns the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from beamline.loadtest.quantities import format_rate

_HALVINGS = 4  # of the first rate, if it does not hold; a stage at a low rate takes long


class Outcome(Enum):
    HELD = auto()
    MISSED = auto()
    UNSURE = auto()  # missed, but the load tester was itself the bottleneck: it says little about the server
    UNKNOWN = auto()  # there is nothing to judge by
    ABANDONED = auto()  # interrupted, or the server is lost: no further stage makes sense


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    why: str = ""  # goes on after "at 80/s "


@dataclass(frozen=True, slots=True)
class Bounds:
    first: float
    largest: float
    precision: float = 0.05  # two rates that differ by less are the same
    stages: int = 30  # at most

    @property
    def smallest(self) -> float:
        return self.first / float(2**_HALVINGS)


@dataclass(frozen=True, slots=True)
class FoundRate:
    rate: float | None  # the highest that held
    confirmed: bool  # it did so twice
    exhausted: bool  # it is the largest that may be tried
    wall: float | None  # the lowest that did not
    last: Verdict | None  # on the wall; or why the search ended before its time

    @property
    def limited_by_client(self) -> bool:
        return self.last is not None and self.last.outcome is Outcome.UNSURE

    @property
    def abandoned(self) -> bool:
        return self.last is not None and self.last.outcome is Outcome.ABANDONED

    def conclusion(self, limit: str) -> str:
        """In one sentence, for the report."""
        ended = self.last is not None and self.last.outcome in (Outcome.ABANDONED, Outcome.UNKNOWN)
        wall = f"at {format_rate(self.wall)} {self.last.why}" if self.last is not None else ""
        if self.rate is None:
            return f"nothing is known of {limit}: {wall}" if ended else f"no rate held {limit}: {wall}"
        held = f"{limit} holds up to {format_rate(self.rate)}" + ("" if self.confirmed else " (seen once)")
        if self.exhausted:
            return f"{held}, the highest that was tried (--max-rate)"
        return f"{held}, as far as was searched: {wall}" if ended else "; ".join(filter(None, (held, wall)))


def highest_rate(measure: Callable[[float], Verdict], bounds: Bounds) -> FoundRate:
    return _Search(measure, bounds).run()


class _Search:
    def __init__(self, measure: Callable[[float], Verdict], bounds: Bounds) -> None:
        self._measure = measure
        self._bounds = bounds
        self._held: dict[float, int] = {}  # how many times
        self._wall: float | None = None
        self._last: Verdict | None = None
        self._left = bounds.stages

    def run(self) -> FoundRate:
        rate: float | None = self._bounds.first
        while rate is not None and self._left:
            verdict = self._judged(rate)
            if verdict.outcome is Outcome.HELD:
                self._held[rate] = self._held.get(rate, 0) + 1
            else:
                self._wall, self._last = rate, verdict
                # An interruption at a rate that held before does not disprove it.
                if verdict.outcome in (Outcome.ABANDONED, Outcome.UNKNOWN):
                    break
                self._held = {held: times for held, times in self._held.items() if held < rate}
            rate = self._next()
        best = max(self._held, default=None)
        return FoundRate(
            rate=best,
            confirmed=best is not None and self._held[best] > 1,
            exhausted=best is not None and best >= self._bounds.largest,
            wall=self._wall,
            last=self._last,
        )

    def _judged(self, rate: float) -> Verdict:
        """A stage in which something else than the server was slow is measured once more: it may have been chance."""
        self._left -= 1
        verdict = self._measure(rate)
        if verdict.outcome in (Outcome.UNSURE, Outcome.UNKNOWN) and self._left:
            self._left -= 1
            verdict = self._measure(rate)
        return verdict

    def _next(self) -> float | None:
        best = max(self._held, default=None)
        if best is None:
            assert self._wall is not None, "whatever did not hold is a wall"
            lower = self._wall / 2
            return lower if lower >= self._bounds.smallest else None
        if self._wall is None:
            if best < self._bounds.largest:
                return min(2 * best, self._bounds.largest)
        elif self._wall / best > 1 + self._bounds.precision:
            return float((self._wall * best) ** 0.5)
        # Once may have been luck.
        return best if self._held[best] < 2 else None
