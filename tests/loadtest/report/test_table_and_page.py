"""The table, the Markdown and the HTML page say the same, and hide nothing."""

from __future__ import annotations

import json
import re

import numpy as np

from beamline.loadtest.report.document import GateResult
from beamline.loadtest.report.markdown import markdown
from beamline.loadtest.report.page import page
from beamline.loadtest.report.table import summary
from tests.loadtest.doubles import exponential_stage, records_of, report_of, search_of, stage_from

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
