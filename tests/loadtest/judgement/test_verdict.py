"""Whether a stage held the SLO, and if not, who was the cause."""

from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement.gate import parse_slo
from beamline.loadtest.judgement.rate_search import Outcome, Verdict
from beamline.loadtest.judgement.verdict import judge
from beamline.loadtest.stage import StagePlan
from tests.loadtest.doubles import exponential_stage, latency_of, records_of, stage_from

UNAVAILABLE = 14


def test_an_slo_is_read():
    slo = parse_slo("p95=500ms")
    assert (slo.share, slo.seconds) == (0.95, 0.5)
    with pytest.raises(LoadTestError, match="write p95=500ms"):
        parse_slo("95")


def outcome(stage, slo, allowed_errors=0.0):
    return judge(stage, slo, allowed_errors).outcome


def test_a_limit_is_not_held_by_failing_or_falling_behind():
    slo = parse_slo("p95=1s")
    assert outcome(exponential_stage(), slo) is Outcome.HELD
    times = np.linspace(0, 9.99, 1000)
    failing = stage_from(records_of(times, [0.1] * 1000, [0] * 980 + [UNAVAILABLE] * 20), 100, 10)
    assert judge(failing, slo, 0.01) == Verdict(Outcome.MISSED, "2.00 % of the requests failed")
    assert outcome(failing, slo, 0.05) is Outcome.HELD
    growing = stage_from(records_of(times, times * 0.09), 100, 10)  # every second, a bit slower
    assert latency_of(growing).maximum < 1
    assert outcome(growing, slo) is Outcome.HELD
    behind = stage_from(records_of(times, times * 0.3), 100, 10)
    assert outcome(behind, parse_slo("p95=1h")) is Outcome.MISSED
    assert any("did not keep up" in note for note in behind.notes)


def test_there_is_no_verdict_without_the_percentile():
    few = stage_from(records_of([1, 2, 3, 4], [0.1] * 4), 1, 10)
    found = judge(few, parse_slo("p95=1s"), 0.0)
    assert found == Verdict(Outcome.UNKNOWN, "p95 was not measured: 4 answers are too few")
    assert outcome(exponential_stage(), parse_slo("first_token_p50=1s")) is Outcome.UNKNOWN  # nothing was streamed


def test_a_stage_is_long_enough_for_its_verdict():
    plan = StagePlan(duration=33.0, warmup=3.0, seed=0)
    requests = parse_slo("p95=1s").least_requests
    assert [parse_slo(f"{text}=1s").least_requests for text in ("p50", "p95", "p99")] == [20, 100, 500]
    assert plan.of_at_least(requests, 50).duration == 33
    assert plan.of_at_least(requests, 2).duration == 53


def test_who_missed_the_limit():
    """The tool is to blame only for what it added itself."""
    times = np.linspace(0, 9.99, 1000)
    slo = parse_slo("p95=500ms")
    slow = stage_from(records_of(times, [0.6] * 1000), 100, 10)

    def with_client(**changed):
        return slow.model_copy(update={"client": slow.client.model_copy(update={"reasons": ("late",), **changed})})

    assert judge(slow, slo, 0.0) == Verdict(Outcome.MISSED, "p95 was 600 ms")
    late = with_client(saturated=True, send_lag_p99=0.02)
    assert judge(late, slo, 0.0) == Verdict(Outcome.MISSED, "p95 was 600 ms")
    ours = judge(with_client(saturated=True, send_lag_p99=0.2), slo, 0.0)
    assert ours.outcome is Outcome.UNSURE
    assert ours.why == (
        "p95 was 600 ms, but there the load tester was itself the bottleneck (late): the server may do more"
    )
    assert outcome(with_client(saturated=True, crowded=True), slo) is Outcome.UNSURE
    assert outcome(with_client(saturated=True, send_lag_p99=0.2), parse_slo("p95=1s")) is Outcome.HELD


def test_a_stopped_stage_ends_the_search_or_misses():
    slo = parse_slo("p95=1s")
    stage = exponential_stage()
    overloaded = stage.model_copy(update={"stopped": "the server gave no good answer for 10 s (UNAVAILABLE)"})
    assert outcome(overloaded, slo) is Outcome.MISSED
    assert outcome(overloaded.model_copy(update={"ok": 0}), slo) is Outcome.ABANDONED
    assert outcome(stage.model_copy(update={"stopped": "interrupted"}), slo) is Outcome.ABANDONED


HELD, MISSED = Verdict(Outcome.HELD), Verdict(Outcome.MISSED, "p95 was 9 s")


UNSURE, UNKNOWN = Verdict(Outcome.UNSURE, "it was us"), Verdict(Outcome.UNKNOWN, "p95 was not measured")


ABANDONED = Verdict(Outcome.ABANDONED, "it was stopped early (interrupted)")
