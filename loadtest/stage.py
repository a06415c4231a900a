"""One stage: the load is sent, and its records become the `Stage` of the report, with the server's own metrics, the
health of the load tester, and the caveats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from beamline.loadtest.judgement import client_health
from beamline.loadtest.judgement.caveats import caveats_of
from beamline.loadtest.judgement.server_load import server_samples, server_times
from beamline.loadtest.judgement.statistics import Statistics, Window, statistics_of, statuses_of, timeline
from beamline.loadtest.load.arrivals import Arrivals, ClosedLoop, offered_rate
from beamline.loadtest.load.records import Records
from beamline.loadtest.load.worker_pool import StageOutcome, Watch, WorkerPool
from beamline.loadtest.report.document import Stage
from beamline.loadtest.targets.server_metrics import Scraper
from beamline.loadtest.targets.status import OK


@dataclass(frozen=True, slots=True)
class StagePlan:
    duration: float  # of a stage, the warm-up included
    warmup: float
    seed: int
    shares: frozenset[float] = field(default_factory=frozenset)  # percentiles that gates ask for

    def of_at_least(self, requests: int, rate: float) -> StagePlan:
        """Longer, if so many would not be measured otherwise."""
        return replace(self, duration=max(self.duration, self.warmup + requests / rate))


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    stage: Stage
    records: Records


def measure(
    pool: WorkerPool, arrivals: Arrivals, plan: StagePlan, scraper: Scraper | None, watch: Watch
) -> MeasuredStage:
    machine = client_health.MachineLoad()
    outcome = pool.run(arrivals, plan.duration, plan.seed, watch)
    return MeasuredStage(stage_of(outcome, arrivals, plan, scraper, machine.busy()), outcome.records)


def stage_of(
    outcome: StageOutcome, arrivals: Arrivals, plan: StagePlan, scraper: Scraper | None, machine_busy: float | None
) -> Stage:
    ended = plan.duration if outcome.stopped is None else min(plan.duration, outcome.sending_ended)
    end = min(ended, _last_answer(outcome.records)) if outcome.lost else ended
    window = Window(min(plan.warmup, end), end)
    statistics = statistics_of(outcome.records, window, plan.shares)
    readings = scraper.between(outcome.start, outcome.start + ended) if scraper is not None else []
    open_loop = not isinstance(arrivals, ClosedLoop)
    measured = outcome.records.within(window.begin, window.end)
    rows = measured.rows
    lags = np.asarray(rows["sent"] - rows["intended"]) if open_loop else np.empty(0)
    bins = timeline(outcome.records, ended)
    client = client_health.judge_client(outcome.health, lags, measured.latency[rows["status"] == OK], machine_busy)
    return Stage(
        arrivals=str(arrivals),
        open_loop=open_loop,
        offered_rate=offered_rate(arrivals),
        warmup=window.begin,
        seconds=window.seconds,
        **{name: getattr(statistics, name) for name in Statistics.__dataclass_fields__},
        after=statuses_of(outcome.records.within(end, math.inf)) if outcome.lost else (),
        timeline=bins,
        server=server_samples(readings, outcome.start),
        server_times=server_times([each for each in readings if window.begin <= each.at - outcome.start <= window.end]),
        client=client,
        notes=tuple(
            caveats_of(
                outcome, statistics, window, bins, plan.shares, open_loop, None if client.crowded else machine_busy
            )
        ),
        stopped=outcome.stopped,
    )


def _last_answer(records: Records) -> float:
    """When a server that was lost gave its last good one: what came after is no measurement of it any more."""
    good = records.rows["finished"][records.rows["status"] == OK]
    return float(good.max()) if len(good) else math.inf
