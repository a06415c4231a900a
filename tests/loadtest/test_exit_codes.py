"""The exit code of a run, by its report."""

from __future__ import annotations

from beamline.loadtest.command import exit_code
from beamline.loadtest.report.document import GateResult
from tests.loadtest.doubles import exponential_stage, records_of, report_of, search_of, stage_from

UNAVAILABLE = 14


def test_exit_codes():
    good = exponential_stage()
    bad = stage_from(records_of([1, 2, 3], [0.1] * 3, [0, 0, UNAVAILABLE]), 1, 10)
    dead = stage_from(records_of([1], [0.1], [UNAVAILABLE]), 1, 10)
    gate = GateResult(expression="p95>1ms", measured="5 ms", failed=True)
    nothing = search_of(rate=None, stage=None)
    assert exit_code(report_of(good), 0.0) == 0
    assert exit_code(report_of(bad), 0.0) == 3
    assert exit_code(report_of(bad), 0.5) == 0
    assert exit_code(report_of(good, bad), 0.0) == 0
    assert exit_code(report_of(dead, dead), 1.0) == 3
    assert exit_code(report_of(good).model_copy(update={"complete": False}), 0.0) == 3
    assert exit_code(report_of(good).model_copy(update={"gates": (gate,)}), 0.0) == 1
    assert exit_code(report_of(good, search=nothing), 0.0) == 1
