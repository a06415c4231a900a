"""Confidence intervals hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.judgement import bootstrap
from beamline.loadtest.judgement.bootstrap import Resampled
from beamline.loadtest.judgement.statistics import block_of
from beamline.loadtest.report.document import Distribution
from tests.loadtest.doubles import exponential_stage, interval_of, latency_of, records_of, stage_from


def percentiles(distribution: Distribution | None) -> dict[float, float]:
    assert distribution is not None
    return {each.share: each.seconds for each in distribution.percentiles}


def test_intervals_hold_the_truth_as_often_as_they_say():
    """p90 of exponential latencies is known; of 40 runs, about 2 may miss it."""
    truth = -0.05 * np.log(0.1)
    hits = 0
    for seed in range(40):
        stage = exponential_stage(seconds=10, rate=100, seed=seed)
        interval = interval_of(stage, 0.9)
        hits += interval.low <= truth <= interval.high
    assert hits >= 33


def test_intervals_know_that_neighbours_are_alike():
    """The same latencies, once shuffled and once in long waves: only blocks see the difference."""
    times = np.linspace(0, 29.99, 6000)
    waves = 0.1 + 0.05 * np.sin(2 * np.pi * times / 7)
    shuffled = np.random.default_rng(0).permutation(waves)

    def width(latencies):
        stage = stage_from(records_of(times, latencies), 200, 30)
        interval = interval_of(stage, 0.5)
        return interval.high - interval.low

    assert width(waves) > 3 * width(shuffled)


def test_a_short_run_has_no_intervals():
    stage = exponential_stage(seconds=1)
    assert all(each.interval is None for each in latency_of(stage).percentiles)
    assert "too short for confidence intervals" in stage.notes
    assert bootstrap.interval(np.array([])) is None
    assert not Resampled([]).enough


def test_stored_blocks_are_those_of_the_run():
    stage = exponential_stage()
    resampled = Resampled([block_of(block) for block in stage.blocks])
    assert float(np.median(resampled.percentile(0.5))) == pytest.approx(
        latency_of(stage).percentiles[0].seconds, rel=0.03
    )
    assert float(np.median(resampled.throughput())) == pytest.approx(stage.throughput, rel=0.02)
