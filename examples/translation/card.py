"""The measured parts of a model card: written between marks, so that everything else stays as somebody wrote it.

<!-- figures --> ... <!-- end of figures -->
<!-- sentences --> ... <!-- end of sentences -->

and, where a card has them, visitors and copies (first_words.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Quality:
    bleu: float
    chrf: float

    def __str__(self) -> str:
        return f"{self.bleu:.2f} / {self.chrf:.1f}"


@dataclass(frozen=True)
class Training:
    """Where a run stood when its checkpoint was written: the last validation in its log."""

    step: int
    tokens: int  # of the target
    hours: float
    perplexity: float
    bleu: float  # greedy, on validation lines

    @classmethod
    def read(cls, log: Path) -> Training:
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        validated = [entry for entry in entries if "bleu" in entry]
        if not validated:
            raise ValueError(f"{log} has no validation yet")
        last = validated[-1]
        return cls(last["step"], last["tokens"], last["seconds"] / 3600, last["perplexity"], last["bleu"])


def has(card: str, part: str) -> bool:
    return f"<!-- {part} -->" in card


def replaced(card: str, part: str, content: str) -> str:
    """The card with another content of a part."""
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    if card.count(begin) != 1 or card.count(end) != 1:
        raise ValueError(f"the card must have {begin} and {end}, once each")
    before, rest = card.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content.strip()}\n{end}{after}"


def figures(
    lines: int,
    measured: Mapping[str, Mapping[int, Quality]],
    served: str,
    megabytes: float,
    training: Training,
    elsewhere: Mapping[str, Mapping[int, Quality]] | None = None,
) -> str:
    """`measured`: what was measured -> beam -> quality; `served` is the one that is shipped, and `elsewhere` what that
    does with lines of other kinds."""
    beams = sorted({beam for qualities in measured.values() for beam in qualities})
    rows = [f"| BLEU / chrF, {lines:,} test lines | " + " | ".join(f"beam {beam}" for beam in beams) + " |"]
    rows.append("|---|" + "---|" * len(beams))
    for name, qualities in measured.items():
        cells = [str(qualities[beam]) if beam in qualities else "" for beam in beams]
        rows.append(f"| {f'**{name}, as shipped**' if name == served else name} | " + " | ".join(cells) + " |")
    for name, qualities in (elsewhere or {}).items():
        rows.append(f"| as shipped, {name} | " + " | ".join(str(qualities[beam]) for beam in beams) + " |")
    facts = [
        "| | |",
        "|---|---|",
        f"| Size | {megabytes:.1f} MB in all |",
        f"| Training | {training.step:,} steps, {training.tokens / 1e6:.1f} million target tokens, "
        f"{training.hours:.1f} hours in training steps |",
        f"| Validation, greedy | perplexity {training.perplexity:.1f}, {training.bleu:.1f} BLEU |",
    ]
    return "\n".join([*rows, "", *facts])


def sentence_table(sources: Sequence[str], translations: Sequence[str]) -> str:
    rows = [
        f"| {number} | {cell(source)} | {cell(translation)} |"
        for number, (source, translation) in enumerate(zip(sources, translations, strict=True), 1)
    ]
    return "\n".join(["| | English | as served |", "|---|---|---|", *rows])


def cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")
