"""The progress line: one line in a terminal, few in a log."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from beamline.loadtest.load.worker_messages import Progress
from beamline.loadtest.report.progress_line import ProgressLine

UNAVAILABLE = 14


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(sent=100, ok=90, errors=0) -> Progress:
    statuses = Counter({0: ok, UNAVAILABLE: errors} if errors else {0: ok})
    return Progress(0, sent, 7, statuses, Counter({64 * 10: ok}))


def test_the_live_line_has_rate_percentiles_and_errors():
    live = ProgressLine(Terminal())
    live.begin("Poisson, 100/s", 30)
    live.see(progress(errors=3))
    line = live.line(live._began + 1)
    assert "sent   100/s" in line
    assert "ok  90.0/s" in line
    assert "in flight    7" in line
    assert "p99  1.03 ms" in line
    assert "errors 3 UNAVAILABLE" in line


def test_a_terminal_has_one_line_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch):
    moments = iter(range(100))
    monkeypatch.setattr("beamline.loadtest.report.progress_line.time.monotonic", lambda: float(next(moments)))
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    live = ProgressLine(stream)
    live.begin("Poisson, 100/s", 30)
    for _ in range(3):
        live.see(progress())
    live.end()
    *lines, last = stream.getvalue().split("\r\033[K")[1:]
    assert [len(line) for line in lines] == [59] * 3
    assert last == ""


def test_a_log_is_not_flooded():
    stream = io.StringIO()
    live = ProgressLine(stream)
    live.begin("x", 30)
    for _ in range(20):
        live.see(progress())
    live.end()
    assert stream.getvalue() == ""
