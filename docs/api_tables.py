"""Writes the tables of docs/api.md from protos/beamline.proto: `make docs`.

A table stands between `<!-- fields of NAME -->` (a message or an enum) and `<!-- end -->`; all else in the page is
written by hand. What has no place of its own yet comes last, between `<!-- others -->` and `<!-- end of others -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from beamline.serving.api.http.proto_comments import Member, declarations

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OTHERS = re.compile(r"(<!-- others -->\n).*?(<!-- end of others -->)", re.DOTALL)


def declared() -> dict[str, list[Member]]:
    """The fields of every message, and the values of every enum."""
    return {name: each.members for name, each in declarations().items() if each.keyword != "service"}


def table(rows: list[Member], known: set[str]) -> str:
    return "\n".join(_lines(rows, known)) + "\n"


def _lines(rows: list[Member], known: set[str]) -> Iterator[str]:
    fields = any(row.kind for row in rows)
    yield "| field | type | |" if fields else "| value | |"
    yield "|---|---|---|" if fields else "|---|---|"
    for row in rows:
        said = "; ".join(part for part in (row.oneof and f"one of `{row.oneof}`", row.comment) if part)
        comment = re.sub(r"(?<![`\w])(\|)", r"\\|", said)
        kind = re.sub(r"(\w+)$", lambda word: _linked(word[1], known), row.kind)
        yield f"| `{row.name}` | {kind} | {comment} |" if fields else f"| `{row.name}` | {comment} |"


def _linked(kind: str, known: set[str]) -> str:
    return f"[{kind}](#{kind.lower()})" if kind in known else kind


def page(text: str) -> str:
    """The page with its tables as the contract is now."""
    messages = declared()
    text = _OTHERS.sub(r"\1\2", text)
    placed = {name for _, name, _ in _TABLE.findall(text)}
    sections = [f"### {name}\n\n<!-- fields of {name} -->\n<!-- end -->\n" for name in messages if name not in placed]
    others = "\n".join(["## Other messages\n", *sections]) if sections else ""
    text = _OTHERS.sub(lambda found: f"{found[1]}{others}{found[2]}", text)
    known = set(messages)

    def renew(found: re.Match[str]) -> str:
        return f"{found[1]}{table(messages[found[2]], known)}{found[3]}"

    return _TABLE.sub(renew, text)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
