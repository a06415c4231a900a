"""One stage from beginning to end: load, the server's own numbers, and the judgement of ourselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from beamline.loadtest import health
from beamline.loadtest.arrivals import Arrivals, ClosedLoop, offered_rate
from beamline.loadtest.fleet import Fleet, StageOutcome, Watch
from beamline.loadtest.notes import notes_of
from beamline.loadtest.record import OK, Records
from beamline.loadtest.report.document import ServerSample, ServerTimes, Stage
from beamline.loadtest.scrape import Reading, Scraper
from beamline.loadtest.summary import Numbers, Window, numbers_of, statuses_of, timeline


@dataclass(frozen=True, slots=True)
class Plan:
    duration: float  # of a stage, the warm-up included
    warmup: float
    seed: int
    shares: frozenset[float] = field(default_factory=frozenset)  # percentiles that gates ask for

    def of_at_least(self, requests: int, rate: float) -> Plan:
        """Longer, if so many would not be measured otherwise."""
        return replace(self, duration=max(self.duration, self.warmup + requests / rate))


@dataclass(frozen=True, slots=True)
class Measured:
    stage: Stage
    records: Records


def measure(fleet: Fleet, arrivals: Arrivals, plan: Plan, scraper: Scraper | None, watch: Watch) -> Measured:
    machine = health.MachineLoad()
    outcome = fleet.run(arrivals, plan.duration, plan.seed, watch)
    return Measured(stage_of(outcome, arrivals, plan, scraper, machine.busy()), outcome.records)


def stage_of(
    outcome: StageOutcome, arrivals: Arrivals, plan: Plan, scraper: Scraper | None, machine_busy: float | None
) -> Stage:
    ended = plan.duration if outcome.stopped is None else min(plan.duration, outcome.sending_ended)
    end = min(ended, _last_answer(outcome.records)) if outcome.lost else ended
    window = Window(min(plan.warmup, end), end)
    numbers = numbers_of(outcome.records, window, plan.shares)
    readings = scraper.between(outcome.start, outcome.start + ended) if scraper is not None else []
    open_loop = not isinstance(arrivals, ClosedLoop)
    measured = outcome.records.within(window.begin, window.end)
    rows = measured.rows
    lags = np.asarray(rows["sent"] - rows["intended"]) if open_loop else np.empty(0)
    bins = timeline(outcome.records, ended)
    client = health.judged(outcome.health, lags, measured.latency[rows["status"] == OK], machine_busy)
    return Stage(
        arrivals=str(arrivals),
        open_loop=open_loop,
        offered_rate=offered_rate(arrivals),
        warmup=window.begin,
        seconds=window.seconds,
        **{name: getattr(numbers, name) for name in Numbers.__dataclass_fields__},
        after=statuses_of(outcome.records.within(end, math.inf)) if outcome.lost else (),
        timeline=bins,
        server=server_samples(readings, outcome.start),
        server_times=server_times([each for each in readings if window.begin <= each.at - outcome.start <= window.end]),
        client=client,
        notes=tuple(
            notes_of(outcome, numbers, window, bins, plan.shares, open_loop, None if client.crowded else machine_busy)
        ),
        stopped=outcome.stopped,
    )


def _last_answer(records: Records) -> float:
    """When a server that was lost gave its last good one: what came after is no measurement of it any more."""
    good = records.rows["finished"][records.rows["status"] == OK]
    return float(good.max()) if len(good) else math.inf


def server_samples(readings: list[Reading], start: float) -> tuple[ServerSample, ...]:
    samples = []
    before: dict[str, tuple[float, float]] = {}
    for reading in readings:
        for model, now in reading.models.items():
            total, count = before.get(model, (now.occupancy_sum, now.occupancy_count))
            steps = now.occupancy_count - count
            samples.append(
                ServerSample(
                    at=reading.at - start,
                    model=model,
                    queue_length=now.queue_length,
                    active_slots=now.active_slots,
                    slots=now.slots,
                    occupancy=(now.occupancy_sum - total) / steps if steps > 0 else None,
                )
            )
            before[model] = (now.occupancy_sum, now.occupancy_count)
    return tuple(samples)


def server_times(readings: list[Reading]) -> tuple[ServerTimes, ...]:
    if not readings:
        return ()
    found = []
    for model, last in readings[-1].models.items():
        first = readings[0].models.get(model, last)
        steps = last.step_seconds_count - first.step_seconds_count
        decoding = last.occupancy_count - first.occupancy_count
        found.append(
            ServerTimes(
                model=model,
                steps=int(steps),
                mean_step_seconds=(last.step_seconds_sum - first.step_seconds_sum) / steps if steps > 0 else None,
                mean_occupancy=(last.occupancy_sum - first.occupancy_sum) / decoding if decoding > 0 else None,
            )
        )
    return tuple(found)
