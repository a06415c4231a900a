"""What a reader has to know before believing a stage's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from beamline.loadtest import units
from beamline.loadtest.fleet import StageOutcome
from beamline.loadtest.report.document import Distribution, TimeBin
from beamline.loadtest.summary import Numbers, Window, fewest

_BUSY = 0.97  # of all cores; a server that computes may well use them up, so it is no fault, but good to know
_BACKLOG = 0.1  # of the requests; a queue that grows by more of them was not only filled by a bad moment
_BY_CHANCE = 4.0  # standard deviations of what is in flight
_FEWEST_BINS = 4
_PRINTED = (0.5, 0.95, 0.99)  # percentiles that every report shows


def notes_of(
    outcome: StageOutcome,
    numbers: Numbers,
    window: Window,
    bins: Sequence[TimeBin],
    shares: frozenset[float],
    open_loop: bool,
    machine_busy: float | None,
) -> Iterator[str]:
    yield from _of_a_stop(outcome, numbers, window)
    if not open_loop:
        yield "closed loop: while the server is slow the clients ask less, so its worst times weigh little here"
    timeouts = sum(each.count for each in numbers.statuses if each.status == "DEADLINE_EXCEEDED")
    if timeouts:
        yield f"{timeouts} requests were given up at their deadline; they count as having taken as long, at least"
    if open_loop and backlog_grew(bins, window.begin, window.end):
        answered, sent = units.rate(numbers.throughput), units.rate(numbers.sent_rate)
        yield f"the server did not keep up ({answered} of {sent}): its latency grows as long as this goes on"
    if machine_busy is not None and machine_busy > _BUSY:
        yield "this machine's cores were all busy; a server on it shares them with this tool"
    yield from _not_measured(numbers.latency, shares)
    if numbers.latency is not None and all(each.interval is None for each in numbers.latency.percentiles):
        yield "too short for confidence intervals"


def backlog_grew(bins: Sequence[TimeBin], begin: float, end: float) -> bool:
    """Whether more and more requests were in flight: in the first half of the measured time and in the second, where it
    was much, and more than chance does. What is under way at the end of any run is no backlog."""
    measured = [each for each in bins if each.start + each.seconds > begin and each.start < end]
    if len(measured) < _FEWEST_BINS:
        return False
    middle = len(measured) // 2
    first, half, last = (measured[index].in_flight for index in (0, middle - 1, -1))
    growth = last - half
    sent = sum(each.sent for each in measured[middle:])
    return first < half and growth > max(_BACKLOG * sent, _BY_CHANCE * (half + 1) ** 0.5)


def _of_a_stop(outcome: StageOutcome, numbers: Numbers, window: Window) -> Iterator[str]:
    if outcome.stopped is None:
        return
    if not window.seconds:
        yield f"the warm-up was not over after {window.end:.1f} s: nothing was measured"
    elif outcome.lost:
        yield (
            f"the last good answer came {window.end:.1f} s after the start: the numbers are of the time up to it, "
            "and what came after is counted apart"
        )
    if numbers.unfinished:
        yield (
            f"{numbers.unfinished} requests had no answer yet when the run was stopped: they count neither as answered "
            "nor as failed, and are in no percentile"
        )


def _not_measured(latency: Distribution | None, shares: frozenset[float]) -> Iterator[str]:
    if latency is None:
        return
    given = {each.share for each in latency.percentiles}
    missing = [share for share in sorted({*_PRINTED, *shares}) if share not in given]
    if missing:
        needed = ", ".join(f"p{100 * share:.6g} takes {fewest(share)}" for share in missing)
        yield f"too few requests for every percentile: {needed}"
