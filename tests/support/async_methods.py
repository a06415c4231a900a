"""`python -m tests.support.async_methods`: beamline/_async_methods.py, made of beamline/_methods.py.

The two differ in a few words, and overloads can't be shared between functions and coroutines; so one is written and the
other made, as httpcore and others do it.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.processes import ROOT

SOURCE, RESULT = ROOT / "beamline/_methods.py", ROOT / "beamline/_async_methods.py"

_CHANGES = (
    (r'\A""".*?"""', '"""Made of `_methods.py` by `make methods`: the same methods, awaited. Not to be edited."""'),
    (r"class Methods", "class AsyncMethods"),
    (r"    def (?!\w*_stream\()", "    async def "),
    (r"\bGenerator\[(\w+), None, None\]", r"AsyncGenerator[\1, None]"),
    (r"import Generator,", "import AsyncGenerator,"),
    (r"self\.(_answer|_one|close)\(", r"await self.\1("),
    (r"\b__(enter|exit)__", r"__a\1__"),
)


def made() -> str:
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in _CHANGES:
        text = re.sub(old, new, text, flags=re.DOTALL)
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(RESULT), "-"]
    return subprocess.run(ruff, cwd=ROOT, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    RESULT.write_text(made(), encoding="utf-8")
