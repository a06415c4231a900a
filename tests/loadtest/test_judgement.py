"""Gates, limits, the search, the comparison, and what the tool says of itself."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beamline.loadtest import compare, health
from beamline.loadtest.arrivals import Poisson
from beamline.loadtest.command import exit_code
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.fleet import StageOutcome
from beamline.loadtest.gate import parse_gate, parse_limit, shares_of
from beamline.loadtest.messages import WorkerHealth
from beamline.loadtest.report.document import GateResult, read
from beamline.loadtest.stage import Plan, stage_of
from beamline.loadtest.units import duration, fraction, per_second, rate, seconds, share
from tests.loadtest.doubles import exponential_stage, records_of, report_of, search_of, stage_from

UNAVAILABLE = 14


def test_durations_are_read_and_written():
    assert [seconds(text) for text in ("500ms", "2s", "1.5m", "0", "250 us")] == [0.5, 2, 90, 0, pytest.approx(25e-5)]
    assert [fraction(text) for text in ("1%", "0", "100 %", "0.5%")] == [0.01, 0, 1, 0.005]
    assert [per_second(text) for text in ("5", "5/s", "0.5 / s")] == [5, 5, 0.5]
    assert [duration(value) for value in (0.0005, 0.0123, 0.5, 2, 90)] == [
        "500 µs",
        "12.3 ms",
        "500 ms",
        "2.00 s",
        "1.5 min",
    ]
    assert (rate(1234.5), share(0.0123), duration(None)) == ("1234/s", "1.23 %", "-")
    for text in ("", "fast", "-1s", "5 parsecs"):
        with pytest.raises(LoadTestError, match="is no duration"):
            seconds(text)
    for text in ("", "many", "101%", "-1%", "nan%", "5/s"):
        with pytest.raises(LoadTestError, match="is no share; write 0% to 100%"):
            fraction(text)
    for text in ("", "a", "5/m", "nan", "-5"):
        with pytest.raises(LoadTestError, match="is no rate; write 5 or 5/s"):
            per_second(text)


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (seconds, "500", "'500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
        (fraction, "1", "'1' needs a unit; write 1%"),
        (parse_gate, "p95>500", "--fail-if 'p95>500': '500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
        (parse_gate, "errors>1", "--fail-if 'errors>1': '1' needs a unit; write 1%"),
        (parse_gate, "errors>0.01", "--fail-if 'errors>0.01': '0.01' needs a unit; write 0.01%"),
        (parse_limit, "p95=500", "--slo 'p95=500': '500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
    ],
)
def test_a_number_without_its_unit_is_refused(parse, text, sentence):
    """It would pass, silently, as something else."""
    with pytest.raises(LoadTestError, match=f"^{re.escape(sentence)}$"):
        parse(text)


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("p95>500ms", False),
        ("p95>10ms", True),
        ("p95 >= 10ms", True),
        ("p97.5>1ms", True),
        ("mean<1s", True),
        ("max>1h", False),
        ("throughput<100", False),
        ("throughput<1000/s", True),
        ("errors>1%", False),
        ("errors>=0", True),
        ("first_token_p95>1s", True),  # nothing streamed: it can't be promised
        ("rate<5", True),  # nothing searched
    ],
)
def test_gates(expression, fails):
    gate = parse_gate(expression)
    records = records_of(np.linspace(0, 9.99, 2000), np.random.default_rng(0).exponential(0.05, 2000))
    stage = stage_from(records, 200, 10)
    assert gate.check(stage, None).failed is fails


def test_percentiles_that_gates_name_are_measured():
    gates = [parse_gate("p97.5>1ms"), parse_gate("errors>1%")]
    assert shares_of(gates, parse_limit("p90=1s")) == {0.975, 0.9}
    few = stage_from(records_of([1, 2, 3], [0.1, 0.2, 0.3]), 1, 10)
    found = gates[0].check(few, None)
    assert found.failed  # what the report does not print is not judged either
    assert found.measured == "nothing: p97.5 takes at least 40 requests, and there are 3"
    unsearched = parse_gate("rate<5").check(few, None)
    assert (unsearched.failed, unsearched.measured) == (True, "nothing: only --slo searches for a rate")


@pytest.mark.parametrize(
    "text",
    [
        "p95",
        "p0>1s",
        "p100>1s",
        "speed>3",
        "p95=1s",
        "errors>many",
        "errors>nan%",
        "throughput<nan",
        "first_token_errors>1%",
    ],
)
def test_wrong_gates_are_refused(text):
    with pytest.raises(LoadTestError):
        parse_gate(text)


# -- the comparison -------------------------------------------------------------------------------------------------


def test_the_same_again_is_noise():
    different = [
        each.metric
        for seed in range(5)
        for each in compare.differences(exponential_stage(seed=2 * seed), exponential_stage(seed=2 * seed + 1))
        if not each.noise
    ]
    assert len(different) <= 2  # of 45 looks at a 99 % interval


def test_a_slower_server_is_seen():
    before, after = exponential_stage(mean=0.05, seed=1), exponential_stage(mean=0.06, seed=2)
    found = {each.metric: each for each in compare.differences(before, after)}
    assert not found["p50"].noise
    assert not found["mean"].noise
    assert (found["p50"].low or 0) < 0.2 < (found["p50"].high or 0)
    assert found["errors"].noise
    text = compare.text(report_of(before), report_of(after))
    assert "Different: mean, p50" in text
    assert "noise" in text


def test_short_runs_can_not_be_told_apart():
    stage = exponential_stage(seconds=1)
    assert "Too short to tell" in compare.text(report_of(stage), report_of(stage))


def test_sweeps_are_compared_rate_by_rate():
    sweep = report_of(*(exponential_stage(rate=rate) for rate in (50, 100)))
    assert [(a.offered_rate, b.offered_rate) for a, b in compare.paired(sweep, sweep)] == [(50, 50), (100, 100)]
    with pytest.raises(LoadTestError, match="no stage with the same rate"):
        compare.paired(sweep, report_of(*(exponential_stage(rate=rate) for rate in (51, 102))))


# -- itself ---------------------------------------------------------------------------------------------------------


def judged(cpu=0.5, loop_lag=1e-4, send_lag=1e-4, late=1.0, median=0.01, slowest=0.01, machine=0.5, requests=1000):
    """A share of the requests is sent with `send_lag`; most have the median latency, and 2 % the slowest."""
    worker = WorkerHealth(cpu_seconds=cpu * 10, wall_seconds=10, loop_lags=np.full(100, loop_lag))
    lags = np.where(np.arange(requests) < requests * late, send_lag, 0.0)
    latencies = np.where(np.arange(1000) < 20, slowest, median)
    return health.judged([worker] * (os.cpu_count() or 1), lags, latencies, machine)


def test_it_says_when_it_is_the_bottleneck():
    assert not judged().saturated
    assert "more --workers" in judged(cpu=0.95).reasons[0]
    assert "50.0 % of the requests were sent 3.00 ms late" in judged(send_lag=0.003).reasons[0]
    assert "1.00 % of the requests were sent 3.00 ms late" in judged(send_lag=0.003, late=0.02).reasons[0]
    assert "event loop" in judged(loop_lag=0.003).reasons[0]
    assert "99.0 % busy, 50.0 % with this tool" in judged(machine=0.99).reasons[0]
    assert not judged(machine=0.99, cpu=0.1).saturated  # with somebody else
    # Three milliseconds in half a second are nothing; some that are late may well be among the slowest ...
    assert not judged(send_lag=0.003, median=0.5, slowest=0.5).saturated
    assert not judged(send_lag=0.01, late=0.02, slowest=0.5).saturated
    # ... but not half of them, when half of the answers are fast.
    assert judged(send_lag=0.01, late=0.6, slowest=0.5).saturated


def test_a_few_late_requests_are_no_bottleneck():
    """p99 of 73 is the slowest one, and on a busy machine one of 73 is late."""
    assert not judged(send_lag=0.1, late=1 / 73, requests=73).saturated
    assert not judged(send_lag=0.1, late=4 / 73, requests=73).saturated
    assert (
        "6.85 % of the requests were sent 100 ms late or later"
        in judged(send_lag=0.1, late=10 / 73, requests=73).reasons
    )
    assert not judged(send_lag=0.1, requests=9).saturated  # too few to say anything
    assert not judged(requests=0).saturated


def test_a_busy_machine_is_said_once():
    worker = WorkerHealth(cpu_seconds=10.0 * (os.cpu_count() or 1), wall_seconds=20.0, loop_lags=np.full(10, 1e-4))
    times = np.linspace(0, 9.99, 1000)

    def told(cpu_seconds):
        health = replace(worker, cpu_seconds=cpu_seconds)
        outcome = StageOutcome(records_of(times, [0.01] * 1000), (health,), 0.0, 10.0, None)
        stage = stage_of(outcome, Poisson(100), Plan(10.0, 0.0, 0), None, 0.99)
        return [text for text in (*stage.notes, *stage.client.reasons) if "this machine's cores" in text]

    busy_with_us, busy_with_others = told(15.0 * (os.cpu_count() or 1)), told(0.1)
    assert len(busy_with_us) == len(busy_with_others) == 1
    assert "with this tool; a server on it waits for them" in busy_with_us[0]


def test_exit_codes():
    good = exponential_stage()
    bad = stage_from(records_of([1, 2, 3], [0.1] * 3, [0, 0, UNAVAILABLE]), 1, 10)
    dead = stage_from(records_of([1], [0.1], [UNAVAILABLE]), 1, 10)
    gate = GateResult(expression="p95>1ms", measured="5 ms", failed=True)
    nothing = search_of(rate=None, stage=None)
    assert exit_code(report_of(good), 0.0) == 0
    assert exit_code(report_of(bad), 0.0) == 3
    assert exit_code(report_of(bad), 0.5) == 0
    assert exit_code(report_of(good, bad), 0.0) == 0
    assert exit_code(report_of(dead, dead), 1.0) == 3
    assert exit_code(report_of(good).model_copy(update={"complete": False}), 0.0) == 3
    assert exit_code(report_of(good).model_copy(update={"gates": (gate,)}), 0.0) == 1
    assert exit_code(report_of(good, search=nothing), 0.0) == 1


# -- the stored report ----------------------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_written(tmp_path: Path):
    report = report_of(exponential_stage())
    (tmp_path / "report.json").write_text(report.model_dump_json())
    assert read(tmp_path / "report.json") == read(tmp_path) == report


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "{", "no report"),
        (lambda text: text.replace('"format_version":1', '"format_version":2'), "beamline.loadtest 2; this beamline"),
        (lambda text: text.replace('"sent":', '"send":'), "is damaged: stages.0.sent: Field required"),
    ],
)
def test_a_report_that_is_none_is_refused(tmp_path: Path, change, reason):
    path = tmp_path / "report.json"
    path.write_text(change(report_of(exponential_stage()).model_dump_json()))
    with pytest.raises(LoadTestError, match=reason):
        read(path)
