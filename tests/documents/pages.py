"""What the documents hold: Python blocks and commands, in order, with the marks that stand above them.

A block that is indented by four holds commands, one a line (or joined by a backslash); where they begin with `$ `, the
lines between them are what the command before prints. Anything else stands in a fence with its language. A comment
above a block may say

    <!-- server: a language model -->    which server it asks; see `servers.py`
    <!-- full: why -->                   that it takes long, and is only run by `make test-full`
    <!-- not run: why -->                that no test can run it
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.processes import ROOT

DEFAULT_SERVER = "all"
COMMANDS = ("sh", "console")  # fences that hold commands, too

_MARK = re.compile(r"<!-- (server|full|not run): (.+?) -->")
# A synopsis: options in brackets, words in capitals for what is the reader's, an ellipsis.
_SYNOPSIS = re.compile(r"\[-|\b(?:SOURCE|FOLDER|NAME|FILE|HOST:PORT|MODEL)\b|path/to/|\s\.\.\.$")


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line
    language: str
    content: str
    marks: dict[str, str]

    @property
    def server(self) -> str:
        return self.marks.get("server", DEFAULT_SERVER)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line of a page; `prints` is what the page shows behind it."""

    block: Block
    text: str
    prints: str | None

    @property
    def is_synopsis(self) -> bool:
        return _SYNOPSIS.search(self.text) is not None


def pages() -> list[str]:
    """Those whose commands and Python are run."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def all_pages() -> list[str]:
    """And every other page, whose names must exist as well."""
    others = [path for folder in ("examples", "model_repo") for path in (ROOT / folder).rglob("*.md")]
    top = ["ARCHITECTURE.md", "CONTRIBUTING.md"]
    return [*pages(), *top, *sorted(str(path.relative_to(ROOT)) for path in others)]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    lines, marks, number = text_of(page).splitlines(), dict[str, str](), 0
    while number < len(lines):
        start = number
        if found := _MARK.fullmatch(lines[number].strip()):
            marks[found[1]] = found[2]
            number += 1
        elif lines[number].startswith("```"):
            language = lines[number].removeprefix("```").strip()
            number = next(end for end in range(number + 1, len(lines)) if lines[end].startswith("```"))
            yield Block(page, start + 2, language, "\n".join(lines[start + 1 : number]), marks)
            marks, number = {}, number + 1
        elif lines[number].startswith("    ") and (start == 0 or not lines[start - 1].strip() or marks):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            content = textwrap.dedent("\n".join(lines[start:number])).rstrip()
            yield Block(page, start + 1, "sh", content, marks)
            marks = {}
        else:
            marks = marks if not lines[number].strip() else {}
            number += 1


def commands(block: Block) -> list[Command]:
    joined = re.sub(r"\\\n\s*", "", block.content)
    joined = re.sub(r"\n\s+(?=\[)", " ", joined)  # a synopsis goes on in the next line
    lines = [line for line in joined.splitlines() if line.strip()]
    if not lines or not lines[0].startswith("$ "):
        return [Command(block, line, None) for line in lines if not line.startswith("#")]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(block, line.removeprefix("$ "), ""))
        else:
            last = found.pop()
            found.append(Command(block, last.text, f"{last.prints}{line}\n"))
    return found
