"""A backlog that grows is noticed; requests in flight at the end are none."""

from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.load.arrivals import Constant, Poisson
from tests.loadtest.doubles import records_of, stage_from


def behind(stage) -> bool:
    return any("the server did not keep up" in note for note in stage.notes)


def test_what_is_in_flight_at_the_end_is_no_backlog():
    """Slow answers, short runs, no warm-up: many are on their way when the time is over, and nothing grows."""
    rng = np.random.default_rng(0)
    for seconds, rate in ((1, 40), (3, 8), (5, 20), (10, 5), (30, 2)):
        for seed in range(20):
            times = Poisson(rate).times(seconds, seed)
            latencies = 0.05 + rng.exponential(0.2 * seconds, len(times))
            assert not behind(stage_from(records_of(times, latencies), rate, seconds)), (seconds, rate, seed)


@pytest.mark.parametrize(("rate", "capacity", "seconds"), [(40, 20, 5), (40, 35, 30), (100, 50, 3), (4, 2, 60)])
def test_a_queue_that_grows_is_noticed(rate, capacity, seconds):
    arrivals = Constant(rate).times(seconds, 0)
    ends = (np.arange(len(arrivals)) + 1) / capacity
    assert behind(stage_from(records_of(arrivals, ends - arrivals), rate, seconds))
