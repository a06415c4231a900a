"""Draws docs/tree-cache.svg: a beam search as a tree, the cache that holds it, and the mask that picks the paths.

`make docs` writes it. The tree below is the only thing that is made up; cache and ancestry are computed from it as the
step graph does: a step appends its entries, and a beam's row of the ancestry is its parent's row with its own entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("tree-cache.svg")

# The words of every step's beams, best first, each with the beam of the step before that it continues.
STEPS = (
    (("Die", -1), ("Speichern", -1), ("Datei", -1)),
    (("Datei", 0), ("Sie", 1), ("Akte", 0)),
    (("speichern", 0), ("die", 1), ("sichern", 0)),
    ((".", 0), ("Datei", 1), (".", 2)),
)
BEAMS = len(STEPS[0])

CELL, LEFT, ROW = 68, 126, 44
TREE, CACHE, MASK = 92, 284, 396  # where each part begins, from the top
WIDTH, HEIGHT = LEFT + CELL * BEAMS * len(STEPS) + 20, MASK + 34 * BEAMS + 62

STYLE = """
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .small { font-size: 11.5px; fill: #59636e; }
  .head { font-weight: 600; }
  .live { fill: #dbeafe; stroke: #2563eb; }
  .dead { fill: #f6f8fa; stroke: #b1bac4; stroke-dasharray: 4 3; }
  .gone { fill: #818b98; }
  .edge { stroke: #2563eb; stroke-width: 1.6; fill: none; }
  .lost { stroke: #b1bac4; stroke-width: 1.4; stroke-dasharray: 4 3; fill: none; }
  .step { stroke: #d1d9e0; }
  .seen { fill: #2563eb; }
  .unseen { fill: none; stroke: #d1d9e0; }
  .ground { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .live { fill: #172a4d; stroke: #60a5fa; }
    .dead { fill: #151b23; stroke: #656c76; }
    .gone { fill: #7d8590; }
    .edge { stroke: #60a5fa; }
    .lost { stroke: #656c76; }
    .step, .unseen { stroke: #3d444d; }
    .seen { fill: #60a5fa; }
    .ground { fill: #0d1117; }
  }
"""


@dataclass(frozen=True)
class Entry:
    word: str
    place: int  # in the cache
    beam: int
    parent: Entry | None


def grow() -> tuple[list[Entry], list[list[bool]]]:
    """The cache's entries, and the ancestry [K, C] after the last step."""
    entries: list[Entry] = []
    rows = [[False] * BEAMS * len(STEPS) for _ in range(BEAMS)]
    for step in STEPS:
        before = entries[-BEAMS:]
        rows = [list(rows[parent]) for _, parent in step]  # reordering beams: rows are gathered, no entry moves
        for beam, (word, parent) in enumerate(step):
            rows[beam][len(entries)] = True
            entries.append(Entry(word, len(entries), beam, before[parent] if parent >= 0 else None))
    return entries, rows


def centre(entry: Entry) -> tuple[float, float]:
    return LEFT + (entry.place + 0.5) * CELL, TREE + entry.beam * ROW + 20


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'


def tree(entries: list[Entry], alive: set[int]) -> Iterator[str]:
    yield text(
        16, 28, "One request, three beams, four steps: the cache holds the tree, a mask picks the paths.", "head"
    )
    yield text(16, TREE - 14, "the search", "head")
    for number in range(len(STEPS)):
        start = LEFT + number * BEAMS * CELL
        yield text(start + BEAMS * CELL / 2, TREE - 14, f"step {number + 1}", "small", "middle")
        if number:
            yield f'<line x1="{start}" x2="{start}" y1="{TREE - 28}" y2="{TREE + BEAMS * ROW}" class="step"/>'
    for rank in range(BEAMS):
        yield text(16, TREE + rank * ROW + 24, f"beam {rank + 1}", "small")
    for entry in entries:
        if entry.parent is not None:
            (x, y), (x0, y0) = centre(entry), centre(entry.parent)
            middle = (x + x0) / 2
            kind = "edge" if entry.place in alive else "lost"
            yield f'<path d="M{x0 + 31:g},{y0} C{middle:g},{y0} {middle:g},{y} {x - 31:g},{y}" class="{kind}"/>'
    for entry in entries:
        x, y = centre(entry)
        live = entry.place in alive
        yield box(x - 31, y - 14, 62, 28, "live" if live else "dead")
        yield text(x, y + 4.5, entry.word, "small" if live else "small gone", "middle")


def cache(entries: list[Entry], alive: set[int]) -> Iterator[str]:
    yield text(16, CACHE - 22, "the cache", "head")
    yield text(
        LEFT,
        CACHE - 22,
        "one row per request; a step appends the keys and values of its beams, and nothing moves",
        "small",
    )
    yield text(16, CACHE + 24, "keys, values", "small")
    for entry in entries:
        live = entry.place in alive
        yield box(LEFT + entry.place * CELL + 1, CACHE, CELL - 2, 38, "live" if live else "dead")
        yield text(
            LEFT + (entry.place + 0.5) * CELL, CACHE + 23, entry.word, "small" if live else "small gone", "middle"
        )


def mask(entries: list[Entry], rows: list[list[bool]]) -> Iterator[str]:
    yield text(16, MASK - 22, "the ancestry", "head")
    yield text(LEFT, MASK - 22, "which entries each beam attends to; reordering beams gathers its rows", "small")
    for beam, row in enumerate(rows):
        top = MASK + beam * 34
        yield text(16, top + 19, f"beam {beam + 1}", "small")
        for place, seen in enumerate(row):
            yield box(LEFT + place * CELL + 1, top, CELL - 2, 28, "seen" if seen else "unseen")
    bottom = MASK + BEAMS * 34 + 24
    dashed = "Dashed: no living beam descends from it; compaction cuts such entries out before the cache grows."
    yield text(16, bottom, dashed, "small")
    beams = ["".join(_spaced(entries, row)) for row in rows]
    said = " / ".join(f"beam {number}: {words}" for number, words in enumerate(beams, 1))
    yield text(16, bottom + 22, f"What the mask reads: {said}", "small")


def _spaced(entries: list[Entry], row: list[bool]) -> Iterator[str]:
    for entry in (entry for entry in entries if row[entry.place]):
        yield entry.word if entry.word == "." or entry.parent is None else f" {entry.word}"


def picture() -> str:
    entries, rows = grow()
    alive = {place for row in rows for place, seen in enumerate(row) if seen}
    drawn = [*tree(entries, alive), *cache(entries, alive), *mask(entries, rows)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="A beam search as a tree, the cache that holds it, and the ancestry mask">'
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" class="ground"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *drawn, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
