"""Stages that were stopped early, and the caveats that they get."""

from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.targets.status import OK, UNFINISHED
from tests.loadtest.doubles import exponential_stage, latency_of, records_of, stage_from

CANCELLED, UNAVAILABLE = 1, 14


def test_what_we_cancelled_ourselves_has_not_failed():
    """A server that says CANCELLED has failed; one that had no time left to answer has not."""
    statuses = [OK] * 8 + [CANCELLED] + [UNFINISHED] * 3
    stage = stage_from(records_of(np.linspace(0, 9, 12), [0.5] * 12, statuses), 1, 10, stopped="interrupted")
    assert (stage.sent, stage.ok, stage.failed, stage.unfinished) == (12, 8, 1, 3)
    assert sum(each.failed for each in stage.timeline) == sum(each.failed for each in stage.blocks) == 1
    assert latency_of(stage).count == 8
    assert any(note.startswith("3 requests had no answer yet when the run was stopped") for note in stage.notes)


def test_a_lost_server_is_measured_up_to_its_last_answer():
    """Ten answers a second for ten seconds, three of them warm-up; then five seconds of failures."""
    times = np.arange(150) / 10
    latencies = np.where(times < 10, 0.5, 0.001)
    records = records_of(times, latencies, [OK] * 100 + [UNAVAILABLE] * 50, "gone")
    stage = stage_from(records, 10, 15, warmup=3.0, stopped="the server gave no good answer for 5 s", lost=True)
    assert stage.warmup + stage.seconds == pytest.approx(10.4)  # the last one was sent at 9.9 s
    assert stage.throughput == pytest.approx(10, rel=0.03)
    assert (stage.ok, stage.failed, stage.sent) == (70, 4, 74)  # four were sent while the last answer was on its way
    assert [(each.status, each.count, each.detail) for each in stage.after] == [("UNAVAILABLE", 46, "gone")]
    assert any("the last good answer came 10.4 s after the start" in note for note in stage.notes)
    assert sum(each.failed for each in stage.timeline) == 50  # the plot shows all of it
    # Who is interrupted had a server to the end.
    assert stage_from(records, 10, 15, stopped="interrupted").seconds == 15


def test_a_run_that_ends_in_its_warm_up_measures_nothing():
    records = records_of([0.5, 1.0, 2.0], [0.1, 0.1, 0.1], [OK, OK, UNAVAILABLE], "gone")
    stage = stage_from(records, 1, 5, warmup=3.0, stopped="the server gave no good answer for 2 s", lost=True)
    assert (stage.sent, stage.throughput, stage.latency, stage.seconds) == (0, 0, None, 0)
    assert "the warm-up was not over after 1.1 s: nothing was measured" in stage.notes
    assert [each.count for each in stage.after] == [1]


def test_a_missing_percentile_is_explained():
    stage = stage_from(records_of(np.linspace(0, 9, 50), [0.1] * 50), 5, 10, shares=[0.999])
    assert "too few requests for every percentile: p99 takes 100, p99.9 takes 1000" in stage.notes
    assert not any("too few" in note for note in exponential_stage().notes)
