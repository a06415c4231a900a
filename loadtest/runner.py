"""A whole run: one stage, a sweep over rates, or the search for the highest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamline.loadtest.arrivals import Arrivals, at_rate
from beamline.loadtest.fleet import Fleet, Watch
from beamline.loadtest.gate import Limit
from beamline.loadtest.report.document import SearchResult, Stage
from beamline.loadtest.scrape import Scraper
from beamline.loadtest.search import Bounds, Outcome, Verdict, highest_rate
from beamline.loadtest.stage import Measured, Plan, measure
from beamline.loadtest.verdict import judged


@dataclass(frozen=True, slots=True)
class Run:
    measured: tuple[Measured, ...]
    complete: bool  # nothing was stopped before its end
    search: SearchResult | None = None
    not_run: tuple[Arrivals, ...] = ()


class Runner:
    """`begin` is told of every stage and its seconds before it runs, `end` after it."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        scraper: Scraper | None,
        watch: Watch,
        begin: Callable[[Arrivals, float], None],
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
        stage = self._stage(arrivals, self._plan)
        return Run(tuple(self._measured), stage.stopped is None)

    def sweep(self, arrivals: Arrivals, rates: Sequence[float]) -> Run:
        left = [at_rate(arrivals, rate) for rate in rates]
        complete = True
        while left and complete:
            complete = self._stage(left.pop(0), self._plan).stopped is None
        return Run(tuple(self._measured), complete, not_run=tuple(left))

    def search(self, arrivals: Arrivals, limit: Limit, allowed_errors: float, bounds: Bounds) -> Run:
        stage_at: dict[float, int] = {}

        def verdict(rate: float) -> Verdict:
            stage = self._stage(at_rate(arrivals, rate), self._plan.of_at_least(limit.least_requests, rate))
            found = judged(stage, limit, allowed_errors)
            if found.outcome is Outcome.HELD:
                stage_at[rate] = len(self._measured) - 1
            return found

        found = highest_rate(verdict, bounds)
        result = SearchResult(
            limit=limit.expression,
            rate=found.rate,
            stage=stage_at.get(found.rate) if found.rate is not None else None,
            limited_by_client=found.limited_by_client,
            exhausted=found.exhausted,
            conclusion=found.conclusion(limit.expression),
        )
        return Run(tuple(self._measured), not found.abandoned, result)

    def _stage(self, arrivals: Arrivals, plan: Plan) -> Stage:
        self._begin(arrivals, plan.duration)
        measured = measure(self._fleet, arrivals, plan, self._scraper, self._watch)
        self._measured.append(measured)
        self._end(measured.stage)
        return measured.stage
