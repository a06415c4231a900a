"""The caveats of a stage: what a reader has to know before believing its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from beamline.loadtest.judgement.backlog import backlog_grew
from beamline.loadtest.judgement.statistics import Statistics, Window, fewest_requests
from beamline.loadtest.load.worker_pool import StageOutcome
from beamline.loadtest.quantities import format_rate
from beamline.loadtest.report.document import Distribution, TimeBin

_BUSY = 0.97  # of all cores; a server that computes may well use them up, so it is no fault, but good to know
_PRINTED = (0.5, 0.95, 0.99)  # percentiles that every report shows


def caveats_of(
    outcome: StageOutcome,
    statistics: Statistics,
    window: Window,
    bins: Sequence[TimeBin],
    shares: frozenset[float],
    open_loop: bool,
    machine_busy: float | None,
) -> Iterator[str]:
    yield from _of_a_stop(outcome, statistics, window)
    if not open_loop:
        yield "closed loop: while the server is slow the clients ask less, so its worst times weigh little here"
    timeouts = sum(each.count for each in statistics.statuses if each.status == "DEADLINE_EXCEEDED")
    if timeouts:
        yield f"{timeouts} requests were given up at their deadline; they count as having taken as long, at least"
    if open_loop and backlog_grew(bins, window.begin, window.end):
        answered, sent = format_rate(statistics.throughput), format_rate(statistics.sent_rate)
        yield f"the server did not keep up ({answered} of {sent}): its latency grows as long as this goes on"
    if machine_busy is not None and machine_busy > _BUSY:
        yield "this machine's cores were all busy; a server on it shares them with this tool"
    yield from _not_measured(statistics.latency, shares)
    if statistics.latency is not None and all(each.interval is None for each in statistics.latency.percentiles):
        yield "too short for confidence intervals"


def _of_a_stop(outcome: StageOutcome, statistics: Statistics, window: Window) -> Iterator[str]:
    if outcome.stopped is None:
        return
    if not window.seconds:
        yield f"the warm-up was not over after {window.end:.1f} s: nothing was measured"
    elif outcome.lost:
        yield (
            f"the last good answer came {window.end:.1f} s after the start: the numbers are of the time up to it, "
            "and what came after is counted apart"
        )
    if statistics.unfinished:
        yield (
            f"{statistics.unfinished} requests had no answer yet when the run was stopped: they count neither as "
            "answered nor as failed, and are in no percentile"
        )


def _not_measured(latency: Distribution | None, shares: frozenset[float]) -> Iterator[str]:
    if latency is None:
        return
    given = {each.share for each in latency.percentiles}
    missing = [share for share in sorted({*_PRINTED, *shares}) if share not in given]
    if missing:
        needed = ", ".join(f"p{100 * share:.6g} takes {fewest_requests(share)}" for share in missing)
        yield f"too few requests for every percentile: {needed}"
