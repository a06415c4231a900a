"""A comparison sees differences, and calls noise noise."""

from __future__ import annotations

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.judgement import compare
from tests.loadtest.doubles import exponential_stage, report_of


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
