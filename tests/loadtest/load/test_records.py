"""Records keep every request, across processes and in the CSV file."""

from __future__ import annotations

import csv
from pathlib import Path

from beamline.loadtest.load.records import Recorder, merged, write_csv
from beamline.loadtest.targets.status import OK
from tests.loadtest.doubles import records_of

CANCELLED, UNAVAILABLE = 1, 14


def test_latency_counts_from_the_intended_time():
    recorder = Recorder(("m",))
    recorder.add(number=0, model="m", status=OK, intended=1.0, sent=3.0, finished=3.5)
    assert recorder.records().latency.tolist() == [2.5]


def test_many_rows_are_packed_without_loss():
    records = records_of(range(10_000), [0.5] * 10_000)
    assert records.rows["number"].tolist() == list(range(10_000))


def test_processes_are_joined_by_time():
    records = merged([records_of([0, 2], [1, 1]), records_of([1, 3], [1, 1], [OK, UNAVAILABLE], "gone")])
    assert records.rows["intended"].tolist() == [0, 1, 2, 3]
    assert records.details == {UNAVAILABLE: "gone"}


def test_the_csv_has_every_request(tmp_path: Path):
    write_csv(tmp_path / "requests.csv", [(1, records_of([0.5, 1], [0.25, 0.5], [OK, UNAVAILABLE]))])
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [row["status"] for row in rows] == ["OK", "UNAVAILABLE"]
    assert (rows[0]["latency"], rows[0]["intended"], rows[0]["first_token"]) == ("0.250000", "0.500000", "")
