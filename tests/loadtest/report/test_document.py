"""report.json is read as it was written, and what is no report is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.report.document import read
from tests.loadtest.doubles import exponential_stage, report_of


def test_a_report_is_read_as_it_was_written(tmp_path: Path):
    report = report_of(exponential_stage())
    (tmp_path / "report.json").write_text(report.model_dump_json())
    assert read(tmp_path / "report.json") == read(tmp_path) == report


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: "{", "no report"),
        (lambda text: text.replace('"format_version":1', '"format_version":2'), "beamline.loadtest 2; this beamline"),
        (lambda text: text.replace('"sent":', '"send":'), "is damaged: stages.0.sent: Field required"),
    ],
)
def test_a_report_that_is_none_is_refused(tmp_path: Path, change, reason):
    path = tmp_path / "report.json"
    path.write_text(change(report_of(exponential_stage()).model_dump_json()))
    with pytest.raises(LoadTestError, match=reason):
        read(path)
