"""The table, the page, the live view and the scraper, without a server."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from beamline.loadtest import scrape
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.live import Live
from beamline.loadtest.messages import Progress
from beamline.loadtest.report.document import GateResult
from beamline.loadtest.report.markdown import markdown
from beamline.loadtest.report.page import page
from beamline.loadtest.report.table import summary
from beamline.loadtest.scrape import ModelReading, Reading, Scraper
from beamline.loadtest.stage import server_samples, server_times
from beamline.serving.contract.stats import StepStats
from beamline.serving.telemetry.metrics import Metrics
from tests.loadtest.doubles import closed_port, exponential_stage, records_of, report_of, search_of, stage_from

UNAVAILABLE = 14


def test_the_table_says_what_matters():
    text = summary(report_of(exponential_stage()))
    assert "Poisson, 200/s, measured for 30 s" in text
    assert re.search(r"p99 +\d+ ms  \(\d+ ms to \d+ ms\)", text)
    assert "BOTTLENECK" not in text


def test_the_table_says_what_went_wrong():
    records = records_of(np.linspace(0, 4.9, 50), [0.1] * 50, [0] * 25 + [UNAVAILABLE] * 25, "connection refused")
    stage = stage_from(records, 10, 5, stopped="the server gave no good answer for 10 s (UNAVAILABLE)")
    saturated = stage.client.model_copy(update={"saturated": True, "reasons": ("too slow",)})
    text = summary(report_of(stage.model_copy(update={"client": saturated})))
    assert "STOPPED EARLY: the server gave no good answer" in text
    assert "failed: 25 UNAVAILABLE: connection refused" in text
    assert "THE LOAD TESTER IS THE BOTTLENECK: too slow" in text


def test_a_search_is_a_table_of_its_stages():
    stages = [exponential_stage(rate=rate) for rate in (50, 100, 75)]
    lines = summary(report_of(*stages, search=search_of(rate=75, stage=2))).splitlines()
    assert "p95=500ms holds up to 75.0/s" in lines
    assert next(line for line in lines if line.endswith("<- highest")).split()[0] == "75.0/s"


def test_the_documentation_page_has_the_curve():
    stages = [exponential_stage(rate=rate) for rate in (100, 50)]
    text = markdown(report_of(*stages))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| offered", "| 100/s", "| 50.0/s"]
    assert re.match(r"\| 100/s \| \d+(\.\d)?/s \| \d+(\.\d)?/s \|", rows[1])  # offered, sent, answered
    assert re.search(r'x-axis \["[45]\d(\.\d+)?", "\d+(\.\d+)?"\]', text)
    assert text.count("    line [") == 3
    assert text.endswith("    beamline loadtest\n")
    assert "mermaid" not in markdown(report_of(exponential_stage()))


def test_the_curve_has_every_stage():
    """One with few requests lacks p99, and Mermaid has no gaps: then nobody gets that line."""
    few = stage_from(records_of(np.linspace(0, 9, 50), [0.1] * 50), 5, 10)
    text = markdown(report_of(few, exponential_stage(rate=100), exponential_stage(rate=50)))
    assert re.search(r'x-axis \["5", "[45]\d(\.\d+)?", "\d+(\.\d+)?"\]', text)
    assert text.count("    line [") == 2
    assert "p99 has no line here" in text
    assert "- Note: 5.00/s: too few requests for every percentile: p99 takes 100" in text


def test_a_report_in_markdown_hides_nothing():
    records = records_of(np.linspace(0, 4.9, 50), [0.1] * 50, [0] * 25 + [UNAVAILABLE] * 25, "connection refused")
    stage = stage_from(records, 10, 5, stopped="the server gave no good answer for 10 s (UNAVAILABLE)", lost=True)
    saturated = stage.client.model_copy(update={"saturated": True, "reasons": ("too slow",)})
    gate = GateResult(expression="p95>1ms", measured="100 ms", failed=True)
    report = report_of(exponential_stage(rate=5), stage.model_copy(update={"client": saturated}))
    text = markdown(report.model_copy(update={"not_run": ("Poisson, 20/s", "Poisson, 40/s"), "gates": (gate,)}))
    told = [line for line in text.splitlines() if line.startswith("- ")]
    assert "- Stopped early: 10.0/s: the server gave no good answer for 10 s (UNAVAILABLE)" in told
    assert "- Not run: Poisson, 20/s, Poisson, 40/s" in told
    assert "- Failed: 10.0/s: 24 UNAVAILABLE after the measured time: connection refused" in told
    assert "- The load tester itself was the bottleneck at 10.0/s: too slow" in told  # as offered, not as answered
    assert "- Failed: `p95>1ms`, measured 100 ms" in told
    assert any(line.startswith("- Note: 10.0/s: the last good answer came") for line in told)


def test_what_is_true_of_several_stages_is_said_once():
    stages = [stage_from(records_of(np.linspace(0, 1, 10), [0.1] * 10), rate, 1) for rate in (5, 10)]
    lines = summary(report_of(*stages)).splitlines()
    assert lines.count("note: 5.00/s, 10.0/s: too short for confidence intervals") == 1


def test_the_page_needs_nobody_else():
    text = page(report_of(exponential_stage()))
    hosts = set(re.findall(r"https?://([\w.-]+)", text))
    assert hosts <= {"www.w3.org"}  # the name of SVG, not a place
    assert "default-src 'none'" in text
    assert "{{" not in text


def test_a_server_can_not_write_into_the_page():
    detail = "</script><script>alert(1)</script> {{style}} <!--"
    records = records_of([1, 2], [0.1, 0.1], [0, UNAVAILABLE], detail)
    text = page(report_of(stage_from(records, 1, 10)))
    assert "<script>alert" not in text
    embedded = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    statuses = json.loads(embedded[1])["stages"][0]["statuses"]
    assert statuses[-1]["detail"] == detail


# -- while it runs --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(sent=100, ok=90, errors=0) -> Progress:
    statuses = Counter({0: ok, UNAVAILABLE: errors} if errors else {0: ok})
    return Progress(0, sent, 7, statuses, Counter({64 * 10: ok}))


def test_the_live_line_has_rate_percentiles_and_errors():
    live = Live(Terminal())
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
    monkeypatch.setattr("beamline.loadtest.live.time.monotonic", lambda: float(next(moments)))
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    live = Live(stream)
    live.begin("Poisson, 100/s", 30)
    for _ in range(3):
        live.see(progress())
    live.end()
    *lines, last = stream.getvalue().split("\r\033[K")[1:]
    assert [len(line) for line in lines] == [59] * 3
    assert last == ""


def test_a_log_is_not_flooded():
    stream = io.StringIO()
    live = Live(stream)
    live.begin("x", 30)
    for _ in range(20):
        live.see(progress())
    live.end()
    assert stream.getvalue() == ""


# -- the server's own numbers ---------------------------------------------------------------------------------------


def test_the_servers_metrics_are_understood():
    """The real page of the real server: a metric that is renamed there must be noticed here."""
    metrics = Metrics()
    metrics.slots.labels("en-de").set(4)
    observe = metrics.observer("en-de", "en-de", "1")
    step = StepStats(
        slots=4, active=3, remaining=2, queued=5, beam_width=1, cache_length=32, source_length=32, live_entries=9,
        admitted=1, encode_seconds=0.1, decode_seconds=0.2, step_seconds=0.3, moves=0, relayouts=0, compactions=0,
        finished=(),
    )  # fmt: skip
    observe(step)
    observe(step)
    reading = scrape.parsed(metrics.exposition().decode())["en-de"]
    assert (reading.queue_length, reading.active_slots, reading.slots) == (5, 2, 4)
    assert (reading.occupancy_sum, reading.occupancy_count) == (1.5, 2)
    assert [reading.step_seconds_sum, reading.step_seconds_count] == pytest.approx([0.6, 2])


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


class _Guarded(BaseHTTPRequestHandler):
    """Metrics for those who know the word; the others are sent elsewhere or away."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        self.asked.append((self.path, token))
        if self.path == "/moved/metrics":
            self.send_response(302)
            self.send_header("Location", "/metrics")
        else:
            self.send_response(200 if token == "Bearer sesame" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def test_the_token_is_shown_to_the_metrics_too():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        known = Scraper(address, "sesame")
        known.start()
        known.stop()
        assert len(known.between(0, time.monotonic())) == 1
        with pytest.raises(LoadTestError, match=r"HTTP Error 401: .*; give the server's token with --token-file"):
            Scraper(address).start()
        with pytest.raises(LoadTestError, match="HTTP Error 401"):
            Scraper(f"{address}/moved", "sesame").start()
        assert _Guarded.asked[-1] == ("/metrics", None)  # who is sent elsewhere does not take the token along
        server.shutdown()


def test_a_wrong_metrics_address_is_told_before_the_run():
    with pytest.raises(LoadTestError, match="there are no metrics at http://127"):
        Scraper(closed_port()).start()
