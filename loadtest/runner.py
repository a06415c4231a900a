"""A whole run: one stage, a sweep over rates, or the search for the highest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.arrivals import Arrivals, at_rate
from loadtest.fleet import Fleet, Watch
from loadtest.gate import Limit
from loadtest.report.document import SearchResult, Stage
from loadtest.scrape import Scraper
from loadtest.search import Bounds, Verdict, highest_rate
from loadtest.stage import Measured, Plan, kept_up, measure


@dataclass(frozen=True, slots=True)
class Run:
    measured: tuple[Measured, ...]
    search: SearchResult | None = None

    @property
    def stopped(self) -> str | None:
        return self.measured[-1].stage.stopped if self.measured else None


class Runner:
    """`begin` is told of every stage before it runs, `end` after it."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        scraper: Scraper | None,
        watch: Watch,
        begin: Callable[[Arrivals], None],
        end: Callable[[Stage], None],
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._scraper = scraper
        self._watch = watch
        self._begin = begin
        self._end = end
        self._measured: list[Measured] = []

    def single(self, arrivals: Arrivals) -> Run:
        self._stage(arrivals)
        return Run(tuple(self._measured))

    def sweep(self, arrivals: Arrivals, rates: Sequence[float]) -> Run:
        for rate in rates:
            if self._stage(at_rate(arrivals, rate)).stopped is not None:
                break
        return Run(tuple(self._measured))

    def search(self, arrivals: Arrivals, limit: Limit, allowed_errors: float, bounds: Bounds) -> Run:
        stage_at: dict[float, int] = {}

        def verdict(rate: float) -> Verdict:
            stage = self._stage(at_rate(arrivals, rate))
            holds = holds_limit(stage, limit, allowed_errors)
            if holds:
                stage_at[rate] = len(self._measured) - 1
            # Too much load is what the search is after; only who is interrupted wants no other stage.
            abandoned = stage.stopped is not None and not stage.ok
            return Verdict(holds, stage.client.saturated, abandoned or stage.stopped == "interrupted")

        found = highest_rate(verdict, bounds)
        result = SearchResult(
            limit=limit.expression,
            rate=found.rate,
            stage=stage_at.get(found.rate) if found.rate is not None else None,
            limited_by_client=found.limited_by_client,
            exhausted=found.exhausted,
        )
        return Run(tuple(self._measured), result)

    def _stage(self, arrivals: Arrivals) -> Stage:
        self._begin(arrivals)
        measured = measure(self._fleet, arrivals, self._plan, self._scraper, self._watch)
        self._measured.append(measured)
        self._end(measured.stage)
        return measured.stage


def holds_limit(stage: Stage, limit: Limit, allowed_errors: float) -> bool:
    """A queue that grows all the time holds a limit only because the stage was short."""
    measured = limit.measured(stage)
    return (
        stage.stopped is None
        and measured is not None
        and measured <= limit.seconds
        and stage.failed <= allowed_errors * stage.sent
        and kept_up(stage, stage.seconds)
    )
