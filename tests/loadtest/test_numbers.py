"""Records, histogram, bootstrap and summary: the numbers that are reported are those that were measured."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.loadtest import bootstrap, histogram
from beamline.loadtest.arrivals import Constant, Poisson
from beamline.loadtest.bootstrap import Resampled
from beamline.loadtest.record import DEADLINE_EXCEEDED, OK, UNFINISHED, Recorder, joined, write_csv
from beamline.loadtest.report.document import Distribution
from beamline.loadtest.summary import Window, block_of, numbers_of, timeline
from tests.loadtest.doubles import exponential_stage, interval_of, latency_of, records_of, stage_from

CANCELLED, UNAVAILABLE = 1, 14


def percentiles(distribution: Distribution | None) -> dict[float, float]:
    assert distribution is not None
    return {each.share: each.seconds for each in distribution.percentiles}


@given(st.floats(2e-6, 3000.0))
def test_a_bucket_is_never_far_off(seconds):
    found = float(histogram.middle(histogram.bucket(seconds)))
    assert found == pytest.approx(seconds, rel=0.006)
    assert histogram.buckets(np.array([seconds])).tolist() == [histogram.bucket(seconds)]


def test_a_histogram_gives_percentiles():
    values = np.random.default_rng(0).lognormal(-3, 1, 10_000)
    counts = dict(zip(*np.unique(histogram.buckets(values), return_counts=True), strict=True))
    for share in (0.01, 0.5, 0.95, 0.999):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert histogram.percentile(counts, share) == pytest.approx(exact, rel=0.006)
    assert histogram.percentile({}, 0.5) is None


def test_latency_counts_from_the_intended_time():
    recorder = Recorder(("m",))
    recorder.add(number=0, model="m", status=OK, intended=1.0, sent=3.0, finished=3.5)
    assert recorder.records().latency.tolist() == [2.5]


def test_many_rows_are_packed_without_loss():
    records = records_of(range(10_000), [0.5] * 10_000)
    assert records.rows["number"].tolist() == list(range(10_000))


def test_processes_are_joined_by_time():
    records = joined([records_of([0, 2], [1, 1]), records_of([1, 3], [1, 1], [OK, UNAVAILABLE], "gone")])
    assert records.rows["intended"].tolist() == [0, 1, 2, 3]
    assert records.details == {UNAVAILABLE: "gone"}


def test_percentiles_are_exact():
    numbers = numbers_of(records_of(np.linspace(0, 9.99, 1000), np.arange(1, 1001) / 1000), Window(0, 10))
    found = percentiles(numbers.latency)
    assert (found[0.5], found[0.95], found[0.99]) == pytest.approx((0.5, 0.95, 0.99))
    assert latency_of(numbers).maximum == pytest.approx(1.0)


def test_a_percentile_that_is_only_the_maximum_is_not_given():
    found = percentiles(numbers_of(records_of(np.linspace(0, 9, 50), [0.1] * 50), Window(0, 10)).latency)
    assert set(found) == {0.5, 0.75, 0.9, 0.95}


def test_warmup_is_cut_by_intended_time():
    records = records_of([0.5, 1.5, 2.5], [9.0, 0.2, 0.3])
    numbers = numbers_of(records, Window(1, 3))
    assert numbers.sent == 2
    assert latency_of(numbers).maximum == pytest.approx(0.3)
    assert numbers.throughput == pytest.approx(2 / 2)


def test_timeouts_count_as_at_least_their_deadline():
    statuses = [OK] * 90 + [DEADLINE_EXCEEDED] * 10
    latencies = [0.1] * 90 + [5.0] * 10
    numbers = numbers_of(records_of(np.linspace(0, 9, 100), latencies, statuses, "late"), Window(0, 10))
    by_share = {each.share: each for each in latency_of(numbers).percentiles}
    assert [by_share[share].seconds for share in (0.5, 0.95)] == pytest.approx([0.1, 5.0])
    assert [by_share[share].at_least for share in (0.5, 0.95)] == [False, True]
    assert (numbers.ok, numbers.failed) == (90, 10)
    assert {each.status: each.count for each in numbers.statuses} == {"OK": 90, "DEADLINE_EXCEEDED": 10}


def test_quick_failures_do_not_improve_latency():
    statuses = [OK] * 10 + [UNAVAILABLE] * 90 + [CANCELLED]
    numbers = numbers_of(records_of(np.linspace(0, 9, 101), [0.5] * 10 + [0.001] * 91, statuses), Window(0, 10))
    assert latency_of(numbers).count == 10
    assert latency_of(numbers).minimum == pytest.approx(0.5)
    assert numbers.failed == 91


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


def test_the_rate_that_was_really_sent_is_known():
    """A tool that falls behind sends less in its time than it offers."""
    recorder = Recorder(("m",))
    for number in range(100):
        recorder.add(
            number=number, model="m", status=OK, intended=number / 10, sent=number / 5, finished=number / 5 + 0.1
        )
    numbers = numbers_of(recorder.records(), Window(0, 10))
    assert (numbers.sent, numbers.sent_rate) == (100, 5.0)


def test_a_missing_percentile_is_explained():
    stage = stage_from(records_of(np.linspace(0, 9, 50), [0.1] * 50), 5, 10, shares=[0.999])
    assert "too few requests for every percentile: p99 takes 100, p99.9 takes 1000" in stage.notes
    assert not any("too few" in note for note in exponential_stage().notes)


# -- falling behind -------------------------------------------------------------------------------------------------


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


def test_nothing_answered_is_a_result_too():
    numbers = numbers_of(records_of([1, 2], [0.1, 0.1], [UNAVAILABLE] * 2, "refused"), Window(0, 10))
    assert (numbers.latency, numbers.throughput, numbers.histogram) == (None, 0, None)
    assert numbers.statuses[0].detail == "refused"


def test_streamed_answers_have_more_to_tell():
    recorder = Recorder(("m",))
    for number in range(20):
        times = [number + 0.2, number + 0.3, number + 0.6]
        recorder.add(
            number=number, model="m", status=OK, intended=number, sent=number, finished=number + 0.6, token_times=times
        )
    numbers = numbers_of(recorder.records(), Window(5, 20))
    assert numbers.first_token is not None
    assert numbers.token_gap is not None
    assert numbers.first_token.count == 15
    assert percentiles(numbers.first_token)[0.5] == pytest.approx(0.2)
    assert numbers.token_gap.count == 30
    assert numbers.token_gap.maximum == pytest.approx(0.3)


def test_the_timeline_adds_up():
    records = records_of(np.linspace(0, 9.9, 400), [0.25] * 400)
    bins = timeline(records, 10)
    assert sum(each.sent for each in bins) == 400
    assert sum(each.answered for each in bins) == (records.rows["finished"] < 10).sum()
    assert bins[5].in_flight == pytest.approx(10, abs=1)
    assert bins[5].p50 == pytest.approx(0.25)


def test_the_csv_has_every_request(tmp_path: Path):
    write_csv(tmp_path / "requests.csv", [(1, records_of([0.5, 1], [0.25, 0.5], [OK, UNAVAILABLE]))])
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [row["status"] for row in rows] == ["OK", "UNAVAILABLE"]
    assert (rows[0]["latency"], rows[0]["intended"], rows[0]["first_token"]) == ("0.250000", "0.500000", "")


# -- intervals ------------------------------------------------------------------------------------------------------


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
