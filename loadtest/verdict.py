"""Whether a stage held a limit; and if not, whether that was the server."""

from __future__ import annotations

from beamline.loadtest import units
from beamline.loadtest.fleet import INTERRUPTED
from beamline.loadtest.gate import Limit
from beamline.loadtest.notes import backlog_grew
from beamline.loadtest.report.document import Stage
from beamline.loadtest.search import Outcome, Verdict


def judged(stage: Stage, limit: Limit, allowed_errors: float) -> Verdict:
    if stage.stopped is not None:
        # Too much load is what a search is after; only who is interrupted, or alone, wants no other stage.
        lost = stage.stopped == INTERRUPTED or not stage.ok
        return Verdict(Outcome.ABANDONED if lost else Outcome.MISSED, f"it was stopped early ({stage.stopped})")
    if stage.failed > allowed_errors * stage.sent:
        return Verdict(Outcome.MISSED, f"{units.share(stage.failed / stage.sent)} of the requests failed")
    measured = limit.measured(stage)
    if measured is None:
        return Verdict(Outcome.UNKNOWN, f"{limit.metric} was not measured: {stage.ok} answers are too few")
    said = f"{limit.metric} was {units.duration(measured)}"
    if measured > limit.seconds:
        return _missed(stage, said, certain=measured - _own_delay(stage) > limit.seconds)
    if backlog_grew(stage.timeline, stage.warmup, stage.warmup + stage.seconds):
        # It holds the limit only because the stage was short.
        return _missed(stage, f"{said}, and the server fell behind more and more", certain=False)
    return Verdict(Outcome.HELD, said)


def _missed(stage: Stage, said: str, certain: bool) -> Verdict:
    """`certain`: without the tool's own delays it would still be too slow. If the tool took the server's cores away,
    nothing is certain."""
    if not stage.client.saturated or (certain and not stage.client.crowded):
        return Verdict(Outcome.MISSED, said)
    reasons = "; ".join(stage.client.reasons)
    return Verdict(
        Outcome.UNSURE,
        f"{said}, but there the load tester was itself the bottleneck ({reasons}): the server may do more",
    )


def _own_delay(stage: Stage) -> float:
    return (stage.client.send_lag_p99 or 0.0) + (stage.client.loop_lag_p99 or 0.0)
