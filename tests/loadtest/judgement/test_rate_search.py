"""The search for the highest rate, without a server."""

from __future__ import annotations

import re

import pytest

from beamline.loadtest.judgement.rate_search import Bounds, Outcome, Verdict, highest_rate

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
