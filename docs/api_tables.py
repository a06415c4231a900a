"""Writes the tables of docs/api.md from protos/beamline.proto: `make docs`.

A table stands between `<!-- fields of NAME -->` (a message or an enum) and `<!-- end -->`; all else in the page is
written by hand. What has no place of its own yet comes last, between `<!-- others -->` and `<!-- end of others -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
PROTO = ROOT / "protos" / "beamline.proto"

_FIELD = re.compile(r"\s*(optional |repeated )?([\w.]+|map<[^>]+>) (\w+) = \d+;\s*(?://\s*(.*))?")
_VALUE = re.compile(r"\s*([A-Z][A-Z0-9_]*) = (\d+);\s*(?://\s*(.*))?")
_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OTHERS = re.compile(r"(<!-- others -->\n).*?(<!-- end of others -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    name: str
    kind: str  # empty for the value of an enum
    comment: str


def declared(proto: str) -> dict[str, list[Row]]:
    """The fields of every message, and the values of every enum."""
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    within, above = "", ""  # the oneof that we are in; a comment that stands in lines of its own
    for line in proto.splitlines():
        if begins := re.match(r"(message|enum) (\w+) \{", line):
            rows = found.setdefault(begins[2], [])
        elif oneof := re.match(r"\s+oneof (\w+) \{", line):
            within = f"one of `{oneof[1]}`"
        elif line.strip() == "}":
            within = ""
        elif comment := re.match(r"\s+// (.*)", line):
            above = f"{above} {comment[1]}".strip()
            continue
        elif value := _VALUE.match(line):
            rows.append(Row(value[1], "", value[3] or above))
        elif field := _FIELD.match(line):
            label, kind, name, text = field.groups()
            kind = f"{'repeated ' if label == 'repeated ' else ''}{kind}"
            rows.append(Row(name, kind, "; ".join(part for part in (within, text or above) if part)))
        above = ""
    return found


def table(rows: list[Row], known: set[str]) -> str:
    return "\n".join(_lines(rows, known)) + "\n"


def _lines(rows: list[Row], known: set[str]) -> Iterator[str]:
    fields = any(row.kind for row in rows)
    yield "| field | type | |" if fields else "| value | |"
    yield "|---|---|---|" if fields else "|---|---|"
    for row in rows:
        comment = re.sub(r"(?<![`\w])(\|)", r"\\|", row.comment)
        kind = re.sub(r"(\w+)$", lambda word: _linked(word[1], known), row.kind)
        yield f"| `{row.name}` | {kind} | {comment} |" if fields else f"| `{row.name}` | {comment} |"


def _linked(kind: str, known: set[str]) -> str:
    return f"[{kind}](#{kind.lower()})" if kind in known else kind


def page(text: str) -> str:
    """The page with its tables as the contract is now."""
    messages = declared(PROTO.read_text(encoding="utf-8"))
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
