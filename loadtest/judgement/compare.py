"""Is B different from A, or is it noise?

Both runs are drawn again from their blocks of time; the interval of the difference says what the two runs can and can't
tell apart. It is a 99 % interval, since several numbers are looked at and one of twenty would differ by chance at 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement import bootstrap
from beamline.loadtest.judgement.bootstrap import Resampled
from beamline.loadtest.judgement.statistics import block_of
from beamline.loadtest.quantities import format_duration, format_rate, format_share
from beamline.loadtest.report.document import Report, Stage

CONFIDENCE = 0.99
_SAME_RATE = 0.01  # stages whose offered rates differ by less are pairs


@dataclass(frozen=True, slots=True)
class Difference:
    metric: str
    before: str
    after: str
    change: float | None  # B / A - 1; a plain difference for shares
    low: float | None
    high: float | None

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def noise(self) -> bool:
        """Whether no difference at all is among what could be."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high


def paired(before: Report, after: Report) -> list[tuple[Stage, Stage]]:
    """Stages that can be compared: the same offered rate, or the only ones."""
    if len(before.stages) == 1 and len(after.stages) == 1:
        return [(before.stages[0], after.stages[0])]
    pairs = [
        (a, b)
        for a in before.stages
        for b in after.stages
        if a.offered_rate and b.offered_rate and abs(b.offered_rate / a.offered_rate - 1) < _SAME_RATE
    ]
    if not pairs:
        raise LoadTestError("the two runs have no stage with the same rate: nothing can be compared")
    return pairs


def differences(before: Stage, after: Stage) -> list[Difference]:
    a = Resampled([block_of(block) for block in before.blocks], seed=1)
    b = Resampled([block_of(block) for block in after.blocks], seed=2)
    enough = a.enough and b.enough
    found = [
        _relative(
            "throughput", before.throughput, after.throughput, a.throughput(), b.throughput(), format_rate, enough
        )
    ]
    if before.latency is not None and after.latency is not None:
        found.append(_relative("mean", before.latency.mean, after.latency.mean, a.mean(), b.mean(), _time, enough))
        later = {percentile.share: percentile.seconds for percentile in after.latency.percentiles}
        for percentile in before.latency.percentiles:
            share = percentile.share
            if share in later:
                draws = a.percentile(share), b.percentile(share)
                name = f"p{100 * share:g}"
                found.append(_relative(name, percentile.seconds, later[share], *draws, _time, enough))
    found.append(_errors(before, after, a, b, enough))
    return found


def text(before: Report, after: Report) -> str:
    return "\n".join(_lines(before, after)) + "\n"


def _lines(before: Report, after: Report) -> Iterator[str]:
    for a, b in paired(before, after):
        yield f"A: {a.arrivals}, {a.seconds:.4g} s, {before.created}"
        yield f"B: {b.arrivals}, {b.seconds:.4g} s, {after.created}"
        if before.setup.workload != after.setup.workload or a.arrivals != b.arrivals:
            yield "note: the two runs did not send the same; a difference may be the load's"
        for name, stage in (("A", a), ("B", b)):
            if stage.client.saturated:
                yield f"note: in {name} the load tester was the bottleneck: {'; '.join(stage.client.reasons)}"
            if stage.stopped:
                yield f"note: {name} was stopped early: {stage.stopped}"
        yield ""
        yield f"  {'':<11} {'A':>10} {'B':>10} {'change':>9}   99 % interval"
        found = differences(a, b)
        for each in found:
            yield _line(each)
        yield ""
        yield _conclusion(found)


def _line(each: Difference) -> str:
    change = "-" if each.change is None else f"{100 * each.change:+.1f} %"
    if not each.known:
        return f"  {each.metric:<11} {each.before:>10} {each.after:>10} {change:>9}   not known"
    interval = f"{100 * (each.low or 0):+.1f} % to {100 * (each.high or 0):+.1f} %"
    return f"  {each.metric:<11} {each.before:>10} {each.after:>10} {change:>9}   {interval:<22} {_word(each)}"


def _word(each: Difference) -> str:
    return "noise" if each.noise else "different"


def _conclusion(found: list[Difference]) -> str:
    if not any(each.known for each in found):
        return "Too short to tell: a run needs some seconds more for confidence intervals."
    different = [each.metric for each in found if not each.noise]
    if not different:
        return "No difference beyond noise. (Longer runs would see smaller ones.)"
    return f"Different: {', '.join(different)}. Run both once more before you believe it: days differ, too."


def _relative(
    metric: str,
    before: float,
    after: float,
    draws_before: NDArray[np.float64],
    draws_after: NDArray[np.float64],
    shown: Callable[[float], str],
    enough: bool,
) -> Difference:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = draws_after / draws_before - 1
    interval = bootstrap.interval(ratio[np.isfinite(ratio)], CONFIDENCE) if enough and before else None
    low, high = interval if interval is not None else (None, None)
    return Difference(metric, shown(before), shown(after), after / before - 1 if before else None, low, high)


def _errors(before: Stage, after: Stage, a: Resampled, b: Resampled, enough: bool) -> Difference:
    share_before, share_after = (stage.failed / stage.sent if stage.sent else 0.0 for stage in (before, after))
    interval = bootstrap.interval(b.failure_share() - a.failure_share(), CONFIDENCE) if enough else None
    low, high = interval if interval is not None else (None, None)
    shown = format_share(share_before), format_share(share_after)
    return Difference("errors", *shown, share_after - share_before, low, high)


def _time(value: float) -> str:
    return format_duration(value)
