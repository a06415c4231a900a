"""A whole run: a single stage, a sweep over rates, or the search for the highest rate that holds the SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamline.loadtest.judgement.gate import Slo
from beamline.loadtest.judgement.rate_search import Bounds, Outcome, Verdict, highest_rate
from beamline.loadtest.judgement.verdict import judge
from beamline.loadtest.load.arrivals import Arrivals, at_rate
from beamline.loadtest.load.worker_pool import Watch, WorkerPool
from beamline.loadtest.report.document import SearchResult, Stage
from beamline.loadtest.stage import MeasuredStage, StagePlan, measure
from beamline.loadtest.targets.server_metrics import Scraper


@dataclass(frozen=True, slots=True)
class Run:
    measured: tuple[MeasuredStage, ...]
    complete: bool  # nothing was stopped before its end
    search: SearchResult | None = None
    not_run: tuple[Arrivals, ...] = ()


class Runner:
    """`begin` is called before every stage, with its arrivals and seconds; `end` after it."""

    def __init__(
        self,
        pool: WorkerPool,
        plan: StagePlan,
        scraper: Scraper | None,
        watch: Watch,
        begin: Callable[[Arrivals, float], None],
        end: Callable[[Stage], None],
    ) -> None:
        self._pool = pool
        self._plan = plan
        self._scraper = scraper
        self._watch = watch
        self._begin = begin
        self._end = end
        self._measured: list[MeasuredStage] = []

    def single(self, arrivals: Arrivals) -> Run:
        stage = self._stage(arrivals, self._plan)
        return Run(tuple(self._measured), stage.stopped is None)

    def sweep(self, arrivals: Arrivals, rates: Sequence[float]) -> Run:
        left = [at_rate(arrivals, rate) for rate in rates]
        complete = True
        while left and complete:
            complete = self._stage(left.pop(0), self._plan).stopped is None
        return Run(tuple(self._measured), complete, not_run=tuple(left))

    def search(self, arrivals: Arrivals, slo: Slo, allowed_errors: float, bounds: Bounds) -> Run:
        stage_at: dict[float, int] = {}

        def verdict(rate: float) -> Verdict:
            stage = self._stage(at_rate(arrivals, rate), self._plan.of_at_least(slo.least_requests, rate))
            found = judge(stage, slo, allowed_errors)
            if found.outcome is Outcome.HELD:
                stage_at[rate] = len(self._measured) - 1
            return found

        found = highest_rate(verdict, bounds)
        result = SearchResult(
            limit=slo.expression,
            rate=found.rate,
            stage=stage_at.get(found.rate) if found.rate is not None else None,
            limited_by_client=found.limited_by_client,
            exhausted=found.exhausted,
            conclusion=found.conclusion(slo.expression),
        )
        return Run(tuple(self._measured), not found.abandoned, result)

    def _stage(self, arrivals: Arrivals, plan: StagePlan) -> Stage:
        self._begin(arrivals, plan.duration)
        measured = measure(self._pool, arrivals, plan, self._scraper, self._watch)
        self._measured.append(measured)
        self._end(measured.stage)
        return measured.stage
