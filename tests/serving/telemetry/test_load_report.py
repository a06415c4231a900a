from __future__ import annotations

import math
from dataclasses import replace

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from beamline.protos import orca_pb2
from beamline.serving.contract.stats import StepStats
from beamline.serving.telemetry.load_report import LoadReport

LONG = 1000.0  # seconds, after which nothing is left of what was before


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def read(report: LoadReport) -> orca_pb2.LoadReport:
    return orca_pb2.LoadReport.FromString(report.message())


def test_the_fields_have_the_numbers_that_balancers_read() -> None:
    """Written down again from xds.data.orca.v3.OrcaLoadReport: nobody else would notice another number."""
    numbers = {field.name: field.number for field in orca_pb2.LoadReport.DESCRIPTOR.fields}
    assert numbers == {"rps_fractional": 6, "eps": 7, "named_metrics": 8, "application_utilization": 9}
    assert orca_pb2.LoadReport(application_utilization=0.5).SerializeToString().hex() == "49000000000000e03f"


def test_utilisation_is_that_of_the_busiest_model() -> None:
    clock = Clock()
    report = LoadReport(clock)
    assert read(report).application_utilization == 0
    report.serves("de", 8)
    report.serves("fr", 4)
    report.step("de", StepStats(4, remaining=8, queued=4))  # two replicas: the figures of a step are added up
    report.step("fr", StepStats(4, remaining=1))
    clock.now += LONG
    found = read(report)
    assert found.application_utilization == pytest.approx(12 / 8)
    assert found.named_metrics == {"active_slots": pytest.approx(9), "queue_length": pytest.approx(4)}
    report.serves("de", 0)
    clock.now += LONG
    assert read(report).application_utilization == pytest.approx(1 / 4)
    report.step("de", StepStats(4, remaining=8))  # finishes what it runs
    clock.now += LONG
    assert read(report).application_utilization == pytest.approx(1 / 4)


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(0, 8)), min_size=1, max_size=30))
def test_utilisation_is_an_average_that_forgets(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    report = LoadReport(clock)
    report.serves("de", 8)
    expected, ago = 0.0, 0.0
    for seconds, active in steps:
        report.step("de", StepStats(8, remaining=active))
        clock.now += seconds
    for seconds, active in reversed(steps):
        expected += active / 8 * (math.exp(-ago / 5) - math.exp(-(ago + seconds) / 5))
        ago += seconds
    assert read(report).application_utilization == pytest.approx(expected, abs=1e-9)


def test_calls_and_errors_a_second() -> None:
    clock = Clock()
    report = LoadReport(clock)
    for number in range(400):
        clock.now += 0.1
        report.call(failed=number % 4 == 0)
        if number > 10:  # from the beginning, not only after a while
            assert read(report).rps_fractional == pytest.approx(10, rel=0.15)
    assert read(report).eps == pytest.approx(2.5, rel=0.1)
    clock.now += LONG
    assert read(report).rps_fractional == pytest.approx(0, abs=1e-6)


def test_the_text_says_the_same() -> None:
    clock = Clock()
    report = LoadReport(clock)
    report.serves("de", 8)
    report.step("de", replace(StepStats(8), remaining=2))
    clock.now += LONG
    kind, _, fields = report.text().partition(" ")
    assert kind == "TEXT"
    assert dict(field.split("=") for field in fields.split(",")) == {
        "application_utilization": "0.25",
        "rps_fractional": "0",
        "eps": "0",
        "named_metrics.active_slots": "2",
        "named_metrics.queue_length": "0",
    }
    assert "application_utilization: 0.25" in text_format.MessageToString(read(report))
