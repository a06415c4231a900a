"""Trace files are read by time, and a wrong line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.arrivals import Replay
from beamline.loadtest.load.trace import read_trace
from beamline.loadtest.targets.beamline_v1 import decoding_options


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path):
    lines = [
        {"time": 12.5, "text": "second", "options": {"beam_size": 4, "return_scores": True}},
        {"time": 10.0, "text": "first", "model": "other"},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    replay, workload = read_trace(path, "m", speed=2.0)
    assert replay == Replay((0.0, 2.5), 2.0)
    assert [(request.text, request.model) for request in workload.requests] == [("first", "other"), ("second", "m")]
    assert decoding_options(workload.request(1).options).beam_size == 4
    assert workload.request(2) == workload.request(0)
    assert {request.model for request in workload.kinds()} == {"m", "other"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "no time"}', "time: Field required"),
        ('{"time": "soon", "text": ""}', "time: Input should be a valid number"),
        ('{"time": 1, "text": "a", "beam": 4}', "beam: Extra inputs"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, line, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "text": "fine"}\n' + line)
    with pytest.raises(LoadTestError, match=f"request 2: {reason}"):
        read_trace(path, "", 1.0)
