"""A real browser for tests: Chromium through chromedriver, over the WebDriver protocol's plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = "needs Chromium and its driver: apt-get install chromium chromium-driver"
PATIENCE = 60.0

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # The browser's own start page must not reach anybody either.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def available() -> bool:
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    def __init__(self, driver: str, session: str) -> None:
        self._base = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        """Returns when the page has loaded and its scripts have run."""
        _call("POST", f"{self._base}/url", {"url": url})

    def evaluate(self, expression: str) -> Any:
        return _call("POST", f"{self._base}/execute/sync", {"script": f"return {expression}", "args": []})

    def click_through(self, script: str) -> None:
        _call("POST", f"{self._base}/execute/sync", {"script": script, "args": []})

    def seem_in_front(self) -> None:
        """A page is told of the focus only while its window has it, which no window of a headless browser does."""
        command = {"cmd": "Emulation.setFocusEmulationEnabled", "params": {"enabled": True}}
        _call("POST", f"{self._base}/goog/cdp/execute", command)

    def press(self, *keys: str, holding: str = "") -> None:
        """Real keys, one after the other, to whatever has the focus; names as in WebDriver (`\\ue004` is Tab)."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        if holding:
            actions = [{"type": "keyDown", "value": holding}, *actions, {"type": "keyUp", "value": holding}]
        _call("POST", f"{self._base}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        _call("POST", f"{self._base}/window/rect", {"width": width, "height": height})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(_call("GET", f"{self._base}/screenshot")))

    def console(self) -> list[str]:
        """Everything that was logged since the last time, errors and warnings of the browser itself too."""
        return [entry["message"] for entry in _call("POST", f"{self._base}/se/log", {"type": "browser"})]

    def requested(self) -> list[str]:
        """The address of everything that was asked for since the last time."""
        entries = _call("POST", f"{self._base}/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        try:
            address = f"http://127.0.0.1:{_port(driver)}"
            options = {"args": [*_FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            session = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                browser = Browser(address, session)
                browser.open("about:blank")
                browser.seem_in_front()
                browser.console(), browser.requested()  # what the start page did is not the test's business
                yield browser
            finally:
                _call("DELETE", f"{address}/session/{session}")
        finally:
            driver.terminate()


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip(".\n").rsplit(" ", 1)[1])
    raise AssertionError("chromedriver did not start")


def _call(method: str, url: str, body: object = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)["value"]
