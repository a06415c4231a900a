"""One stage from beginning to end: load, the server's own numbers, and the judgement of ourselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from loadtest import health, units
from loadtest.arrivals import Arrivals, ClosedLoop, offered_rate
from loadtest.fleet import Fleet, StageOutcome, Watch
from loadtest.record import OK, Records
from loadtest.report.document import ServerSample, ServerTimes, Stage
from loadtest.scrape import Reading, Scraper
from loadtest.summary import Numbers, Window, numbers_of, timeline

_BUSY = 0.97  # of all cores; a server that computes may well use them up, so it is no fault, but good to know
_BACKLOG = 0.1  # of the requests; more of them without an answer, and the server was left behind


@dataclass(frozen=True, slots=True)
class Plan:
    duration: float  # of a stage, the warm-up included
    warmup: float
    seed: int
    shares: frozenset[float] = field(default_factory=frozenset)  # percentiles that gates ask for


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
    # A run that was stopped is measured up to there.
    end = plan.duration if outcome.stopped is None else min(plan.duration, outcome.sending_ended)
    window = Window(min(plan.warmup, end), end)
    numbers = numbers_of(outcome.records, window, plan.shares)
    readings = scraper.between(outcome.start, outcome.start + end) if scraper is not None else []
    open_loop = not isinstance(arrivals, ClosedLoop)
    measured = outcome.records.within(window.begin, window.end)
    rows = measured.rows
    lags = np.asarray(rows["sent"] - rows["intended"]) if open_loop else np.empty(0)
    client = health.judged(outcome.health, lags, measured.latency[rows["status"] == OK], machine_busy)
    return Stage(
        arrivals=str(arrivals),
        open_loop=open_loop,
        offered_rate=offered_rate(arrivals),
        warmup=window.begin,
        seconds=window.seconds,
        **{name: getattr(numbers, name) for name in Numbers.__dataclass_fields__},
        timeline=timeline(outcome.records, end),
        server=server_samples(readings, outcome.start),
        server_times=server_times([each for each in readings if each.at >= outcome.start + window.begin]),
        client=client,
        notes=tuple(_notes(numbers, window, open_loop, None if client.crowded else machine_busy)),
        stopped=outcome.stopped,
    )


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


def kept_up(numbers: Numbers | Stage, seconds: float) -> bool:
    """Whether about as many answers came as requests were sent. Those that were under way at the end are no backlog."""
    if numbers.latency is None:
        return True
    under_way = numbers.ok / seconds * numbers.latency.minimum  # what an unhurried server has in hand at any moment
    missing = numbers.ok - numbers.throughput * seconds
    return missing <= _BACKLOG * numbers.ok + under_way


def _notes(numbers: Numbers, window: Window, open_loop: bool, machine_busy: float | None) -> Iterable[str]:
    if not open_loop:
        yield "closed loop: while the server is slow the clients ask less, so its worst times weigh little here"
    timeouts = sum(each.count for each in numbers.statuses if each.status == "DEADLINE_EXCEEDED")
    if timeouts:
        yield f"{timeouts} requests were given up at their deadline; they count as having taken as long, at least"
    if open_loop and not kept_up(numbers, window.seconds):
        answered, offered = units.rate(numbers.throughput), units.rate(numbers.sent / window.seconds)
        yield f"the server did not keep up ({answered} of {offered}): its latency grows as long as this goes on"
    if machine_busy is not None and machine_busy > _BUSY:
        yield f"this machine's cores were {units.share(machine_busy)} busy; a server on it shares them with this tool"
    if numbers.latency is not None and all(each.interval is None for each in numbers.latency.percentiles):
        yield "too short for confidence intervals"
