"""The studio in a real browser, as a person would use it, and a server for it."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from beamline.serving.config import ServeConfig
from beamline.serving.engine.core import Engine
from beamline.serving.models.engines import FakeSettings, fake_engine
from beamline.serving.models.loader import Observe, real_makers
from beamline.serving.server import Server
from tests.loadtest.browser import MISSING, Browser, available
from tests.serving.doubles import started
from tests.support.processes import PATIENCE, eventually

TEXT = "The file could not be opened."
TAB, ENTER, CONTROL, RIGHT, ESCAPE = "\ue004", "\ue007", "\ue009", "\ue014", "\ue00c"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
in_chromium = pytest.mark.skipif(not available(), reason=MISSING)


@contextmanager
def in_thread(config: ServeConfig) -> Iterator[str]:
    """A server of this process; its HTTP address."""
    address: list[str] = []
    ready, over = threading.Event(), threading.Event()

    def chatty(observe: Observe) -> Engine:
        engine = fake_engine(FakeSettings(), observe, language_model=True)
        engine.manifest = engine.manifest.model_copy(update={"chat_template": CHAT_TEMPLATE})
        return engine

    async def run() -> None:
        async with started(Server(config, replace(real_makers(config), fake_lm=chatty))) as server:
            assert server.http_address is not None
            address.append(server.http_address)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield address[0]
    finally:
        over.set()
        thread.join()


class Studio:
    def __init__(self, browser: Browser, address: str) -> None:
        self.browser = browser
        self.address = address

    def __call__(self, expression: str) -> Any:
        return self.browser.evaluate(expression)

    def wait(self, condition: str) -> None:
        eventually(lambda: bool(self(f"!!({condition})")), condition)

    def view(self, name: str, model: str | None = None) -> None:
        if model is not None:
            self.browser.click_through(
                f"const all = document.querySelector('#model');"
                f"all.value = [...all.options].find((one) => one.textContent === {model!r}).value;"
                "all.dispatchEvent(new Event('change', {bubbles: true}));"
            )
            self.wait(f"document.querySelector('nav a[href=\"#{name}\"]')")
        self.browser.click_through(f"document.querySelector('nav a[href=\"#{name}\"]').click();")
        self.wait(f"document.querySelector('nav a[href=\"#{name}\"][aria-current]')")

    def fill(self, selector: str, value: str, event: str = "input") -> None:
        self.browser.click_through(
            f"const field = document.querySelector({selector!r}); field.value = {json.dumps(value)};"
            f"field.dispatchEvent(new Event({event!r}, {{bubbles: true}}));"
        )

    def option(self, name: str, value: str) -> None:
        label = f"[...document.querySelectorAll('.field')].find((one) => one.textContent.startsWith({name!r}))"
        self.browser.click_through(
            f"const field = {label}.querySelector('input, select'); field.value = {json.dumps(value)};"
            "for (const event of ['input', 'change']) field.dispatchEvent(new Event(event, {bubbles: true}));"
        )
        self.wait(f"{label}.querySelector('input, select').value === {json.dumps(value)}")

    def go(self, answered: str = "document.querySelector('#answer')") -> None:
        self.browser.click_through("document.querySelector('.primary').click();")
        self.wait(f"{answered} && document.querySelector('.primary:not(.stop)')")

    def translate(self, text: str, beams: int) -> None:
        self.option("Beams", str(beams))
        self.fill("#text", text)
        self.go(f"document.querySelectorAll('.tree .answer').length > 2 && {hypotheses(beams)}")

    def text(self, selector: str) -> str:
        found: str = self(f"document.querySelector({selector!r}).textContent")
        return found


def hypotheses(count: int) -> str:
    return "true" if count == 1 else f"document.querySelectorAll('.nbest li').length === {count}"


def asked(address: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)


def translation(address: str, text: str, beams: int, model: str = "en-de") -> Any:
    wanted = dict.fromkeys(("return_scores", "return_tokens", "return_alignment", "return_search_trace"), True)
    options = {"beam_size": beams, "num_hypotheses": beams, **wanted}
    return asked(address, "/v1/translate", {"model": model, "inputs": [{"text": text}], "options": options})[
        "translations"
    ][0]
