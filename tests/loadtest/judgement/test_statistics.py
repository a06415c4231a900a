"""The statistics of a stage are those of its records."""

from __future__ import annotations

import numpy as np
import pytest

from beamline.loadtest.judgement.statistics import Window, statistics_of, timeline
from beamline.loadtest.load.records import Recorder
from beamline.loadtest.report.document import Distribution
from beamline.loadtest.targets.status import DEADLINE_EXCEEDED, OK
from tests.loadtest.doubles import latency_of, records_of

CANCELLED, UNAVAILABLE = 1, 14


def percentiles(distribution: Distribution | None) -> dict[float, float]:
    assert distribution is not None
    return {each.share: each.seconds for each in distribution.percentiles}


def test_percentiles_are_exact():
    statistics = statistics_of(records_of(np.linspace(0, 9.99, 1000), np.arange(1, 1001) / 1000), Window(0, 10))
    found = percentiles(statistics.latency)
    assert (found[0.5], found[0.95], found[0.99]) == pytest.approx((0.5, 0.95, 0.99))
    assert latency_of(statistics).maximum == pytest.approx(1.0)


def test_a_percentile_that_is_only_the_maximum_is_not_given():
    found = percentiles(statistics_of(records_of(np.linspace(0, 9, 50), [0.1] * 50), Window(0, 10)).latency)
    assert set(found) == {0.5, 0.75, 0.9, 0.95}


def test_warmup_is_cut_by_intended_time():
    records = records_of([0.5, 1.5, 2.5], [9.0, 0.2, 0.3])
    statistics = statistics_of(records, Window(1, 3))
    assert statistics.sent == 2
    assert latency_of(statistics).maximum == pytest.approx(0.3)
    assert statistics.throughput == pytest.approx(2 / 2)


def test_timeouts_count_as_at_least_their_deadline():
    statuses = [OK] * 90 + [DEADLINE_EXCEEDED] * 10
    latencies = [0.1] * 90 + [5.0] * 10
    statistics = statistics_of(records_of(np.linspace(0, 9, 100), latencies, statuses, "late"), Window(0, 10))
    by_share = {each.share: each for each in latency_of(statistics).percentiles}
    assert [by_share[share].seconds for share in (0.5, 0.95)] == pytest.approx([0.1, 5.0])
    assert [by_share[share].at_least for share in (0.5, 0.95)] == [False, True]
    assert (statistics.ok, statistics.failed) == (90, 10)
    assert {each.status: each.count for each in statistics.statuses} == {"OK": 90, "DEADLINE_EXCEEDED": 10}


def test_quick_failures_do_not_improve_latency():
    statuses = [OK] * 10 + [UNAVAILABLE] * 90 + [CANCELLED]
    statistics = statistics_of(records_of(np.linspace(0, 9, 101), [0.5] * 10 + [0.001] * 91, statuses), Window(0, 10))
    assert latency_of(statistics).count == 10
    assert latency_of(statistics).minimum == pytest.approx(0.5)
    assert statistics.failed == 91


def test_the_rate_that_was_really_sent_is_known():
    """A tool that falls behind sends less in its time than it offers."""
    recorder = Recorder(("m",))
    for number in range(100):
        recorder.add(
            number=number, model="m", status=OK, intended=number / 10, sent=number / 5, finished=number / 5 + 0.1
        )
    statistics = statistics_of(recorder.records(), Window(0, 10))
    assert (statistics.sent, statistics.sent_rate) == (100, 5.0)


def behind(stage) -> bool:
    return any("the server did not keep up" in note for note in stage.notes)


def test_nothing_answered_is_a_result_too():
    statistics = statistics_of(records_of([1, 2], [0.1, 0.1], [UNAVAILABLE] * 2, "refused"), Window(0, 10))
    assert (statistics.latency, statistics.throughput, statistics.histogram) == (None, 0, None)
    assert statistics.statuses[0].detail == "refused"


def test_streamed_answers_have_more_to_tell():
    recorder = Recorder(("m",))
    for number in range(20):
        times = [number + 0.2, number + 0.3, number + 0.6]
        recorder.add(
            number=number, model="m", status=OK, intended=number, sent=number, finished=number + 0.6, token_times=times
        )
    statistics = statistics_of(recorder.records(), Window(5, 20))
    assert statistics.first_token is not None
    assert statistics.token_gap is not None
    assert statistics.first_token.count == 15
    assert percentiles(statistics.first_token)[0.5] == pytest.approx(0.2)
    assert statistics.token_gap.count == 30
    assert statistics.token_gap.maximum == pytest.approx(0.3)


def test_the_timeline_adds_up():
    records = records_of(np.linspace(0, 9.9, 400), [0.25] * 400)
    bins = timeline(records, 10)
    assert sum(each.sent for each in bins) == 400
    assert sum(each.answered for each in bins) == (records.rows["finished"] < 10).sum()
    assert bins[5].in_flight == pytest.approx(10, abs=1)
    assert bins[5].p50 == pytest.approx(0.25)
