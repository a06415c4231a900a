"""Whether a stage held the SLO; and if not, whether the server or the load tester was the cause."""

from __future__ import annotations

from beamline.loadtest.judgement.backlog import backlog_grew
from beamline.loadtest.judgement.gate import Slo
from beamline.loadtest.judgement.rate_search import Outcome, Verdict
from beamline.loadtest.load.worker_pool import INTERRUPTED
from beamline.loadtest.quantities import format_duration, format_share
from beamline.loadtest.report.document import Stage


def judge(stage: Stage, slo: Slo, allowed_errors: float) -> Verdict:
    if stage.stopped is not None:
        # A search goes on after a stage with too much load, but not after an interruption or the loss of the server.
        lost = stage.stopped == INTERRUPTED or not stage.ok
        return Verdict(Outcome.ABANDONED if lost else Outcome.MISSED, f"it was stopped early ({stage.stopped})")
    if stage.failed > allowed_errors * stage.sent:
        return Verdict(Outcome.MISSED, f"{format_share(stage.failed / stage.sent)} of the requests failed")
    measured = slo.measured(stage)
    if measured is None:
        return Verdict(Outcome.UNKNOWN, f"{slo.metric} was not measured: {stage.ok} answers are too few")
    said = f"{slo.metric} was {format_duration(measured)}"
    if measured > slo.seconds:
        return _missed(stage, said, certain=measured - _own_delay(stage) > slo.seconds)
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
