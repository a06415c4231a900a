from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Bursty, ClosedLoop, Constant, Poisson, Replay, at_rate


def test_constant_is_even():
    assert Constant(4).times(2, 0).tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_poisson_has_the_rate_and_exponential_gaps():
    times = Poisson(100).times(500, 1)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(50_000, rel=0.02)
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)
    assert np.mean(gaps > 0.01) == pytest.approx(np.exp(-1), rel=0.02)


@pytest.mark.parametrize("process", [Poisson(50), Bursty(50, 1, 2)])
def test_a_seed_repeats_a_run(process):
    assert process.times(10, 7).tolist() == process.times(10, 7).tolist()
    assert process.times(10, 7).tolist() != process.times(10, 8).tolist()


def test_bursts_keep_the_mean_rate_and_the_pauses():
    times = Bursty(rate=50, on=1, off=4).times(500, 3)
    assert len(times) == pytest.approx(25_000, rel=0.02)
    assert (times % 5).max() < 1
    assert np.all(np.diff(times) >= 0)


def test_a_run_may_end_in_the_middle_of_a_burst():
    assert Bursty(rate=100, on=2, off=2).times(5, 0).max() < 5


def test_replay_keeps_the_times():
    replay = Replay((0.0, 3.0, 1.0), speed=2)
    assert replay.times(10, 0).tolist() == [0, 0.5, 1.5]
    assert replay.times(1, 0).tolist() == [0, 0.5]


def test_only_some_have_a_rate_to_choose():
    assert at_rate(Bursty(1, 2, 3), 9) == Bursty(9, 2, 3)
    with pytest.raises(LoadTestError, match="can't be chosen"):
        at_rate(ClosedLoop(4), 9)
