"""The HTML report in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beamline.loadtest.report.document import Report, ServerSample, Stage
from beamline.loadtest.report.page import page
from tests.loadtest.browser import MISSING, Browser, available, browsing
from tests.loadtest.doubles import exponential_stage, records_of, report_of, search_of, stage_from

pytestmark = [pytest.mark.full, pytest.mark.skipif(not available(), reason=MISSING)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        running.resize(1280, 1800)
        yield running


def show(browser: Browser, report: Report, folder: Path) -> None:
    path = folder / "report.html"
    path.write_text(page(report), encoding="utf-8")
    browser.open(path.as_uri())
    assert browser.evaluate("document.body.dataset.ready") == "true"
    assert browser.console() == []
    assert browser.requested() == [path.as_uri()]


def titles(browser: Browser, kind: str) -> list[str]:
    script = f"[...document.querySelectorAll('.plot[data-{kind}]')].map((plot) => plot.querySelector('h2').textContent)"
    found: list[str] = browser.evaluate(script)
    return found


def with_server(stage: Stage) -> Stage:
    samples = [
        ServerSample(at=at, model="m", queue_length=3, active_slots=2, slots=4, occupancy=0.5) for at in range(30)
    ]
    return stage.model_copy(update={"server": tuple(samples)})


def test_all_plots_are_drawn(browser: Browser, tmp_path: Path) -> None:
    show(browser, report_of(with_server(exponential_stage())), tmp_path)
    assert titles(browser, "drawn") == [
        "Latency over time",
        "Rate over time",
        "Latency by percentile",
        "Histogram",
        "Queue",
        "Batch occupancy",
    ]
    assert titles(browser, "empty") == []
    # Drawn means ink: every plot has a line or bars of some size.
    smallest = "Math.min(...[...document.querySelectorAll('.plot svg')].map((svg) => svg.getBBox().width))"
    assert browser.evaluate(smallest) > 400
    marks = "[...document.querySelectorAll('.plot svg')].every((svg) => svg.querySelector('path, rect:not(.shade)'))"
    assert browser.evaluate(marks) is True
    assert "NaN" not in browser.evaluate("document.body.innerHTML.split('<script')[0]")
    overflow = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert browser.evaluate(overflow) is False
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_sweep_has_its_curve_and_a_choice(browser: Browser, tmp_path: Path) -> None:
    stages = [exponential_stage(mean=0.02 * rate / 50, rate=rate, seconds=10) for rate in (50, 100, 200)]
    report = report_of(*stages, search=search_of(rate=100, stage=1))
    show(browser, report.model_copy(update={"not_run": ("Poisson, 400/s",)}), tmp_path)
    alerts = browser.evaluate("document.querySelector('#alerts').textContent")
    assert "Result: p95=500ms holds up to 75.0/s." in alerts
    assert "Not run: Poisson, 400/s" in alerts
    assert titles(browser, "drawn")[0] == "Throughput against latency"
    assert browser.evaluate("document.querySelector('#choice select').value") == "1"
    before = browser.evaluate("document.querySelector('#cards').textContent")
    browser.click_through(
        "const s = document.querySelector('#choice select'); s.value = 2; s.dispatchEvent(new Event('change'))"
    )
    assert browser.evaluate("document.querySelector('#cards').textContent") != before
    assert browser.console() == []


def test_a_run_that_failed_is_shown_too(browser: Browser, tmp_path: Path) -> None:
    detail = "</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
    dead = stage_from(records_of(np.linspace(0, 5, 20), [0.1] * 20, [14] * 20, detail), 4, 5, stopped="it is gone")
    show(browser, report_of(dead), tmp_path)
    assert "it is gone" in browser.evaluate("document.querySelector('#alerts').textContent")
    assert detail in browser.evaluate("document.querySelector('#tables').textContent")
    assert titles(browser, "empty") == ["Latency over time", "Latency by percentile", "Histogram"]
    show(browser, report_of(), tmp_path)


def test_hovering_tells_the_numbers(browser: Browser, tmp_path: Path) -> None:
    show(browser, report_of(exponential_stage()), tmp_path)
    browser.click_through(
        "const svg = document.querySelector('.plot svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 50}))"
    )
    text = browser.evaluate("document.querySelector('.plot .tip:not([hidden])').textContent")
    assert "p99:" in text
    assert browser.console() == []
