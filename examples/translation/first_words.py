"""What a model makes of first words that people try: visitors' sentences, judged by a reader, and strings to copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.translation.card import cell
from examples.translation.data import read_lines

FOLDER = Path(__file__).parent / "first-words"
VISITORS, COPIES = FOLDER / "visitors.tsv", FOLDER / "copies.txt"
JUDGEMENTS, SEEN = FOLDER / "judgements.tsv", FOLDER / "seen.txt"
VERDICTS = {  # what a reader may say of a translation -> how it is counted
    "right": "right",
    "flawed": "understood, with a mistake",
    "wrong": "wrong",
}
UNJUDGED = "not judged"


def read_columns(path: Path, count: int) -> list[list[str]]:
    rows = [line.split("\t") for line in read_lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != count:
            raise ValueError(f"{path}:{number} has {len(row)} columns; each line has {count}, with tabs between them")
    return rows


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Texts with their translations."""
    return [(source, target) for source, target in read_columns(path, 2)]


def read_judgements(path: Path = JUDGEMENTS) -> dict[tuple[str, str], str]:
    """(sentence, translation) -> verdict: it holds for any model that translates so."""
    judged = {}
    for number, (sentence, translation, verdict) in enumerate(read_columns(path, 3), 1):
        if verdict not in VERDICTS:
            raise ValueError(f"{path}:{number} says {verdict!r}; a verdict is one of {', '.join(VERDICTS)}")
        judged[sentence, translation] = verdict
    return judged


def visitors_table(
    sentences: Sequence[str],
    translations: Sequence[str],
    judged: Mapping[tuple[str, str], str],
    seen: frozenset[str],
) -> str:
    """`seen`: sentences that stood in the text of earlier trainings; the others are counted by themselves, too."""
    verdicts = [judged.get(pair, "") for pair in zip(sentences, translations, strict=True)]
    unseen = [verdict for sentence, verdict in zip(sentences, verdicts, strict=True) if sentence not in seen]
    counts = [f"| | of {len(sentences)} | of the {len(unseen)} that no training has seen |", "|---|---|---|"]
    everything, new = Counter(verdicts), Counter(unseen)
    for verdict, meaning in {**VERDICTS, "": UNJUDGED}.items():
        if verdict or everything[""]:
            counts.append(f"| {meaning} | {everything[verdict]} | {new[verdict]} |")
    rows = []
    for number, (sentence, translation, verdict) in enumerate(zip(sentences, translations, verdicts, strict=True), 1):
        mark = "" if sentence in seen else " *"
        rows.append(f"| {number} | {cell(sentence)}{mark} | {cell(translation)} | {verdict or UNJUDGED} |")
    return "\n".join([*counts, "", "| | English (*: not seen) | as served | |", "|---|---|---|---|", *rows])


def copies_summary(strings: Sequence[str], translations: Sequence[str]) -> str:
    changed = [(s, t) for s, t in zip(strings, translations, strict=True) if s != t]
    share = f"{len(strings) - len(changed)} of {len(strings)} strings come through as they are."
    if not changed:
        return share
    rows = [f"{string}  ->  {translation}" for string, translation in changed]
    return "\n".join([f"{share} The others are changed:", "", "```text", *rows, "```"])
