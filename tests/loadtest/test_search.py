"""Limits, who missed them, and the search for the highest rate that holds one."""

from __future__ import annotations

import re

import numpy as np
import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.gate import parse_limit
from beamline.loadtest.search import Bounds, Outcome, Verdict, highest_rate
from beamline.loadtest.stage import Plan
from beamline.loadtest.verdict import judged
from tests.loadtest.doubles import exponential_stage, latency_of, records_of, stage_from

UNAVAILABLE = 14


def test_limits():
    limit = parse_limit("p95=500ms")
    assert (limit.share, limit.seconds) == (0.95, 0.5)
    with pytest.raises(LoadTestError, match="write p95=500ms"):
        parse_limit("95")


def outcome(stage, limit, allowed_errors=0.0):
    return judged(stage, limit, allowed_errors).outcome


def test_a_limit_is_not_held_by_failing_or_falling_behind():
    limit = parse_limit("p95=1s")
    assert outcome(exponential_stage(), limit) is Outcome.HELD
    times = np.linspace(0, 9.99, 1000)
    failing = stage_from(records_of(times, [0.1] * 1000, [0] * 980 + [UNAVAILABLE] * 20), 100, 10)
    assert judged(failing, limit, 0.01) == Verdict(Outcome.MISSED, "2.00 % of the requests failed")
    assert outcome(failing, limit, 0.05) is Outcome.HELD
    growing = stage_from(records_of(times, times * 0.09), 100, 10)  # every second, a bit slower
    assert latency_of(growing).maximum < 1
    assert outcome(growing, limit) is Outcome.HELD
    behind = stage_from(records_of(times, times * 0.3), 100, 10)
    assert outcome(behind, parse_limit("p95=1h")) is Outcome.MISSED
    assert any("did not keep up" in note for note in behind.notes)


def test_there_is_no_verdict_without_the_percentile():
    few = stage_from(records_of([1, 2, 3, 4], [0.1] * 4), 1, 10)
    found = judged(few, parse_limit("p95=1s"), 0.0)
    assert found == Verdict(Outcome.UNKNOWN, "p95 was not measured: 4 answers are too few")
    assert outcome(exponential_stage(), parse_limit("first_token_p50=1s")) is Outcome.UNKNOWN  # nothing was streamed


def test_a_stage_is_long_enough_for_its_verdict():
    plan = Plan(duration=33.0, warmup=3.0, seed=0)
    requests = parse_limit("p95=1s").least_requests
    assert [parse_limit(f"{text}=1s").least_requests for text in ("p50", "p95", "p99")] == [20, 100, 500]
    assert plan.of_at_least(requests, 50).duration == 33
    assert plan.of_at_least(requests, 2).duration == 53


def test_who_missed_the_limit():
    """The tool is to blame only for what it added itself."""
    times = np.linspace(0, 9.99, 1000)
    limit = parse_limit("p95=500ms")
    slow = stage_from(records_of(times, [0.6] * 1000), 100, 10)

    def with_client(**changed):
        return slow.model_copy(update={"client": slow.client.model_copy(update={"reasons": ("late",), **changed})})

    assert judged(slow, limit, 0.0) == Verdict(Outcome.MISSED, "p95 was 600 ms")
    late = with_client(saturated=True, send_lag_p99=0.02)
    assert judged(late, limit, 0.0) == Verdict(Outcome.MISSED, "p95 was 600 ms")
    ours = judged(with_client(saturated=True, send_lag_p99=0.2), limit, 0.0)
    assert ours.outcome is Outcome.UNSURE
    assert ours.why == (
        "p95 was 600 ms, but there the load tester was itself the bottleneck (late): the server may do more"
    )
    assert outcome(with_client(saturated=True, crowded=True), limit) is Outcome.UNSURE
    assert outcome(with_client(saturated=True, send_lag_p99=0.2), parse_limit("p95=1s")) is Outcome.HELD


def test_a_stopped_stage_ends_the_search_or_misses():
    limit = parse_limit("p95=1s")
    stage = exponential_stage()
    overloaded = stage.model_copy(update={"stopped": "the server gave no good answer for 10 s (UNAVAILABLE)"})
    assert outcome(overloaded, limit) is Outcome.MISSED
    assert outcome(overloaded.model_copy(update={"ok": 0}), limit) is Outcome.ABANDONED
    assert outcome(stage.model_copy(update={"stopped": "interrupted"}), limit) is Outcome.ABANDONED


# -- the search -----------------------------------------------------------------------------------------------------


HELD, MISSED = Verdict(Outcome.HELD), Verdict(Outcome.MISSED, "p95 was 9 s")
UNSURE, UNKNOWN = Verdict(Outcome.UNSURE, "it was us"), Verdict(Outcome.UNKNOWN, "p95 was not measured")
ABANDONED = Verdict(Outcome.ABANDONED, "it was stopped early (interrupted)")


class Server:
    def __init__(self, capacity: float, client_capacity: float = 1e9) -> None:
        self.capacity, self.client_capacity = capacity, client_capacity
        self.tried: list[float] = []

    def __call__(self, rate: float) -> Verdict:
        self.tried.append(rate)
        if rate <= min(self.capacity, self.client_capacity):
            return HELD
        return UNSURE if rate > self.client_capacity else MISSED


@pytest.mark.parametrize("capacity", [0.7, 3.0, 10.0, 47.0, 333.3, 5000.0])
def test_the_search_finds_the_capacity(capacity):
    server = Server(capacity)
    found = highest_rate(server, Bounds(first=10, largest=100_000))
    assert found.rate is not None
    assert found.rate <= capacity <= found.rate * 1.051
    assert server.tried.count(found.rate) == 2
    assert found.confirmed
    assert len(server.tried) <= 20
    assert re.fullmatch(r"p95=1s holds up to [\d.]+/s; at [\d.]+/s p95 was 9 s", found.conclusion("p95=1s"))


def test_the_search_knows_its_ends():
    nothing = highest_rate(Server(0.01), Bounds(10, 1000))
    assert nothing.rate is None
    assert nothing.conclusion("p95=1s") == "no rate held p95=1s: at 0.62/s p95 was 9 s"
    top = highest_rate(Server(1e9), Bounds(10, 300))
    assert (top.rate, top.exhausted) == (300, True)
    assert top.conclusion("p95=1s") == "p95=1s holds up to 300/s, the highest that was tried (--max-rate)"
    limited = highest_rate(Server(1e9, client_capacity=100), Bounds(10, 1e6))
    assert limited.limited_by_client
    assert limited.rate is not None
    assert limited.rate <= 100 <= limited.rate * 1.051


def test_luck_is_not_confirmed():
    """A rate that held once and then not is no result."""
    lucky = iter([True])

    def measure(rate: float) -> Verdict:
        return HELD if rate <= 20 or (rate == 40 and next(lucky, False)) else MISSED

    assert highest_rate(measure, Bounds(10, 1e6)).rate == pytest.approx(20, rel=0.051)


def scripted(*verdicts: Verdict):
    """These, and then whatever is too fast for 50/s."""
    left, tried = iter(verdicts), []

    def measure(rate: float) -> Verdict:
        tried.append(rate)
        return next(left, HELD if rate <= 50 else MISSED)

    return measure, tried


def test_a_stage_that_was_our_fault_is_tried_again():
    measure, tried = scripted(UNSURE, HELD)
    found = highest_rate(measure, Bounds(10, 1e6))
    assert tried[:3] == [10, 10, 20]
    assert found.rate == pytest.approx(50, rel=0.051)
    assert not found.limited_by_client
    # Twice is a wall, and the sentence says whose.
    found = highest_rate(Server(1e9, client_capacity=100), Bounds(10, 1e6))
    assert re.fullmatch(r"p95=1s holds up to [\d.]+/s; at [\d.]+/s it was us", found.conclusion("p95=1s"))
    # The server's own misses are not blamed on the tool, whatever was before.
    measure, tried = scripted(HELD, HELD, HELD, UNSURE, MISSED)
    found = highest_rate(measure, Bounds(10, 1e6))
    assert not found.limited_by_client
    assert found.conclusion("p95=1s").endswith("p95 was 9 s")


def test_a_search_ends_where_nothing_can_be_known():
    measure, tried = scripted(UNKNOWN, UNKNOWN)
    found = highest_rate(measure, Bounds(10, 1e6))
    assert (found.rate, tried) == (None, [10, 10])
    assert found.conclusion("p95=1s") == "nothing is known of p95=1s: at 10.0/s p95 was not measured"


def test_an_interrupted_search_keeps_what_it_has():
    measure, tried = scripted(HELD, HELD, ABANDONED)
    found = highest_rate(measure, Bounds(10, 1e6))
    assert (found.rate, found.confirmed, found.abandoned, tried) == (20, False, True, [10, 20, 40])
    assert found.conclusion("p95=1s") == (
        "p95=1s holds up to 20.0/s (seen once), as far as was searched: at 40.0/s it was stopped early (interrupted)"
    )
    assert highest_rate(scripted(ABANDONED)[0], Bounds(10, 1e6)).rate is None
