"""The page to try the models, and the description's page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loadtest.browser import MISSING, Browser, available, browsing
from tests.support.processes import ServerProcess, eventually, serving

pytestmark = [pytest.mark.full, pytest.mark.skipif(not available(), reason=MISSING)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("log") / "log.txt", "--fake") as running:
        yield running


def ask(browser: Browser, path: str, model: str, text: str, stream: bool) -> None:
    browser.click_through(
        f"""
        const $ = (id) => document.getElementById(id);
        $('path').value = {path!r};
        $('path').dispatchEvent(new Event('change'));
        $('model').value = JSON.stringify([{model!r}, '1']);
        $('text').value = {text!r};
        $('stream').checked = {"true" if stream else "false"};
        $('output').textContent = '';
        $('form').requestSubmit();
        """
    )


def shown(browser: Browser) -> str:
    found: str = browser.evaluate("document.getElementById('output').textContent")
    return found


@pytest.mark.parametrize(
    ("path", "model", "stream"),
    [
        ("/v1/translate", "fake", False),
        ("/v1/translate", "fake", True),
        ("/v1/generate", "fake-lm", False),
        ("/v1/generate", "fake-lm", True),
    ],
)
def test_the_page_asks_and_shows_the_answer(
    browser: Browser, server: ServerProcess, path: str, model: str, stream: bool
) -> None:
    browser.open(f"http://{server.http}/")
    eventually(lambda: browser.evaluate("document.getElementById('model').length") == 2, "the models are listed")
    ask(browser, path, model, "hello <b>world</b>", stream)
    eventually(lambda: shown(browser).startswith("hello <b>world</b>"), "the answer is shown, as text")
    assert [line for line in browser.console() if "favicon" not in line] == []
    assert all(url.startswith(f"http://{server.http}/") for url in browser.requested())


def test_the_page_shows_scores_and_errors(browser: Browser, server: ServerProcess) -> None:
    browser.open(f"http://{server.http}/")
    eventually(lambda: browser.evaluate("document.getElementById('model').length") == 2, "the models are listed")
    assert browser.evaluate("document.getElementById('target').offsetParent") is None  # only where it is asked for
    ask(browser, "/v1/score", "fake-lm", "hello", stream=False)
    eventually(lambda: "perplexity" in shown(browser), "the scores are shown")
    assert browser.evaluate("document.getElementById('target').offsetParent") is not None
    ask(browser, "/v1/generate", "fake", "hello", stream=True)
    eventually(lambda: "no language model" in shown(browser), "the error is shown")
    assert browser.evaluate("document.getElementById('output').className") == "error"
    browser.console(), browser.requested()


def test_the_description_lists_every_address_and_message(
    browser: Browser, server: ServerProcess, tmp_path: Path
) -> None:
    browser.open(f"http://{server.http}/docs")
    eventually(lambda: browser.evaluate("document.querySelectorAll('h2').length") > 20, "it is rendered")
    headings = browser.evaluate("[...document.querySelectorAll('h2')].map((one) => one.textContent)")
    assert {"POST /v1/translate", "POST /v1/generate", "POST /v1/score", "TranslateRequest"} <= set(headings)
    assert [line for line in browser.console() if "favicon" not in line] == []
