"""Draw validation BLEU over training time, out of a run's log.jsonl, as an SVG that suits a light and a dark page.

python -m examples.translation.curve OUT/log.jsonl --out curve.svg
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 84, 36, 44  # margins; the last point's value stands in the right one
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #424a53 } .title { font-size: 14px; font-weight: 600; fill: #1f2328 }
.grid { stroke: #d1d9e0 } .axis { stroke: #818b98 } .curve { stroke: #0969da; fill: none; stroke-width: 2 }
.point { fill: #0969da } .last { font-weight: 600; fill: #0969da }
@media (prefers-color-scheme: dark) {
text { fill: #b1bac4 } .title { fill: #f0f6fc } .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
.curve { stroke: #58a6ff } .point, .last { fill: #58a6ff } }
"""


@dataclass(frozen=True)
class Point:
    hours: float  # spent in training steps, over all resumed runs
    step: int
    bleu: float


def points(log: Path) -> list[Point]:
    """The validations of a run."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [Point(entry["seconds"] / 3600, entry["step"], entry["bleu"]) for entry in entries if "bleu" in entry]


def ticks(highest: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to the first that is not below `highest`."""
    highest = highest or 1.0
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(gap for gap in (power, 2 * power, 5 * power, 10 * power) if gap >= rough)
    return [number * gap for number in range(math.ceil(highest / gap - 1e-9) + 1)]


def drawing(curve: list[Point], title: str) -> str:
    times, scores = ticks(max(point.hours for point in curve)), ticks(max(point.bleu for point in curve))
    right, bottom, title = WIDTH - RIGHT, HEIGHT - BOTTOM, html.escape(title)

    def x(hours: float) -> float:
        return LEFT + (right - LEFT) * hours / times[-1]

    def y(bleu: float) -> float:
        return bottom - (bottom - TOP) * bleu / scores[-1]

    parts = [f'<text class="title" x="{LEFT}" y="20">{title}</text>']
    for score in scores:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(score):.1f}" y2="{y(score):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(score) + 4:.1f}" text-anchor="end">{score:g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for time in times:
        parts.append(f'<line class="axis" x1="{x(time):.1f}" x2="{x(time):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x(time):.1f}" y="{bottom + 18}" text-anchor="middle">{time:g}</text>')
    middle, last = (LEFT + right) / 2, curve[-1]
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">hours of training</text>')
    places = [f"{x(point.hours):.1f},{y(point.bleu):.1f}" for point in curve]
    parts.append(f'<polyline class="curve" points="{" ".join(places)}"/>')
    for point in curve:
        hint = f"step {point.step}: {point.bleu:.1f}"
        centre = f'cx="{x(point.hours):.1f}" cy="{y(point.bleu):.1f}"'
        parts.append(f'<circle class="point" {centre} r="3"><title>{hint}</title></circle>')
    parts.append(
        f'<text class="last" x="{x(last.hours) + 8:.1f}" y="{y(last.bleu) - 6:.1f}">{last.bleu:.1f}</text>'
        f'<text x="{x(last.hours) + 8:.1f}" y="{y(last.bleu) + 9:.1f}">step {last.step:,}</text>'
    )
    inside = "\n".join(parts)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
    return f"{opening}\n<style>{STYLE}</style>\n{inside}\n</svg>\n"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.translation.curve", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="log.jsonl of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="SVG")
    parser.add_argument("--title", default="BLEU on validation lines, greedy")
    options = parser.parse_args(given)
    curve = points(options.log)
    if not curve:
        sys.exit(f"error: {options.log} has no validation yet")
    options.out.write_text(drawing(curve, options.title), encoding="utf-8")


if __name__ == "__main__":
    main()
