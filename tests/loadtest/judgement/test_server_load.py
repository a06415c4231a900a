"""Queue, slots and steps of the server, from its metrics."""

from __future__ import annotations

from beamline.loadtest.judgement.server_load import server_samples, server_times
from beamline.loadtest.targets.server_metrics import ModelReading, Reading


def test_occupancy_is_of_the_time_between_two_readings():
    readings = [
        Reading(10.0, {"m": ModelReading(0, 0, 4, 10.0, 20, 1.0, 20)}),
        Reading(10.5, {"m": ModelReading(3, 4, 4, 20.0, 30, 1.5, 30)}),
        Reading(11.0, {"m": ModelReading(0, 0, 4, 20.0, 30, 1.5, 30)}),
    ]
    samples = server_samples(readings, 10.0)
    assert [sample.occupancy for sample in samples] == [None, 1.0, None]
    assert [(sample.at, sample.queue_length) for sample in samples] == [(0, 0), (0.5, 3), (1.0, 0)]
    times = server_times(readings)[0]
    assert (times.steps, times.mean_step_seconds, times.mean_occupancy) == (10, 0.05, 1.0)
