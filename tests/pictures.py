"""The README's two pictures, as the studio saves them: `python -m tests.pictures` (needs Chromium and its driver).

One sentence through the shipped model, in a real browser; nothing is drawn by hand.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.loadtest.browser import MISSING, available, browsing
from tests.support.processes import ROOT, eventually, serving

TEXT = "The file could not be opened."
FOLDER = ROOT / "docs" / "pictures"
_CATCH = """
window.saved = {};
const blobs = new Map();
URL.createObjectURL = (blob) => { const name = `blob:${blobs.size}`; blobs.set(name, blob); return name; };
HTMLAnchorElement.prototype.click = function () {
  blobs.get(this.getAttribute('href')).text().then((text) => { window.saved[this.download] = text; });
};
for (const card of ['#beam-tree', '#attention']) document.querySelector(`${card} .tools button`).click();
"""


def main() -> None:
    if not available():
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory() as directory:
        log, profile = Path(directory, "log"), Path(directory, "profile")
        with (
            serving(log, "--repo", str(ROOT / "model_repo"), "--load", "en-de") as server,
            browsing(profile) as browser,
        ):
            browser.resize(1500, 1000)
            browser.open(f"http://{server.http}/")
            eventually(lambda: bool(browser.evaluate("!!document.querySelector('#model')")), "the models are listed")
            browser.click_through(
                f"const text = document.querySelector('#text'); text.value = {json.dumps(TEXT)};"
                "text.dispatchEvent(new Event('input', {bubbles: true}));"
            )
            browser.press("\ue007", holding="\ue009")  # Ctrl+Enter
            eventually(lambda: bool(browser.evaluate("!!document.querySelector('.nbest')")), "it is translated")
            browser.click_through(_CATCH)
            eventually(lambda: browser.evaluate("Object.keys(window.saved).length") == 2, "both are saved")
            pictures = browser.evaluate("window.saved")
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (FOLDER / name).write_text(f"{content}\n", encoding="utf-8")
        print(f"{FOLDER / name}: {len(content)} characters")


if __name__ == "__main__":
    main()
