"""One folder of training text from two archives and our own phrases.

python -m examples.translation.prepare --text en-de.tar.xz --everyday tatoeba.tar.xz --out DATA

`--text` holds {train,valid,test}.{en,de,src}; `--everyday` NAME.{en,de} and NAME-valid.{en,de}, whose NAME becomes the
origin. Phrases and templates, and the visitors' sentences that must not be trained on, are those of first-words/.
Everything else is made from these (augment.py): the same arguments give the same files.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tqdm import tqdm

from examples.translation.augment import (
    Pair,
    copies,
    decorated,
    filled,
    lower,
    replaced,
    upper,
    without_full_stop,
    without_question_mark,
)
from examples.translation.data import read_lines
from examples.translation.first_words import COPIES, FOLDER, VISITORS, read_pairs

COPIED_LINES, FILLED_LINES = 60_000, 30_000
EVERYDAY_ORIGINS = ("ding-phrase", "phrases", "wesnoth")  # beside the archive's own: people talk like that
DICTIONARY = "ding"  # its entries are words, abbreviations and grammar: not to be varied
# how many of the pairs get a copy of each kind: (of everyday language, of other text)
UPPER, LOWER, UNMARKED, DECORATED, REPLACED = (0.08, 0.03), (0.10, 0.02), (0.2, 0.03), (0.06, 0.04), (0.5, 0.1)


def comparable(text: str) -> str:
    """Equal for lines that differ in case, spaces and final punctuation only."""
    return " ".join(text.casefold().split()).rstrip(" .!?…")


def read_archive(path: Path) -> dict[str, list[str]]:
    """Every file of it, as lines."""
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        found = {Path(member.name).name: archive.extractfile(member) for member in members}
        return {
            name: file.read().decode("utf-8").removesuffix("\n").replace("\r\n", "\n").split("\n")
            for name, file in found.items()
            if file
        }


def pairs_of(files: dict[str, list[str]], stem: str, source: str, target: str, origin: str | None = None) -> list[Pair]:
    names = [f"{stem}.{source}", f"{stem}.{target}", *([] if origin else [f"{stem}.src"])]
    if missing := [name for name in names if name not in files]:
        raise ValueError(f"the archive has no {', '.join(missing)}; it has {', '.join(sorted(files))}")
    columns = [files[name] for name in names]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{', '.join(names)} have {', '.join(str(len(column)) for column in columns)} lines")
    return [Pair(s, t, origin or o[0]) for s, t, *o in zip(*columns, strict=True)]


def augmented(pairs: list[Pair], everyday: Iterable[str], random: Random) -> Iterator[Pair]:
    """Varied copies of a share of the pairs."""
    everyday = set(everyday)
    for pair in pairs:
        if pair.origin == DICTIONARY or not pair.source or not pair.target:
            continue
        column = 0 if pair.origin in everyday else 1

        def drawn(shares: tuple[float, float], column: int = column) -> bool:
            return random.random() < shares[column]

        made: list[Pair | None] = []
        if drawn(UPPER):
            made.append(upper(pair))
        if drawn(LOWER):
            made.append(lower(pair))
        if drawn(UNMARKED):
            bare = without_question_mark(pair) or without_full_stop(pair)
            # who leaves out the mark often leaves out the capitals, too
            made.append(lower(bare) if bare and random.random() < 0.4 else bare)
        if drawn(DECORATED):
            made.append(decorated(pair, random))
        if drawn(REPLACED):
            made.append(replaced(pair, random))
        yield from (one for one in made if one)


def prepare(text: Path, everyday: Path, out: Path, source: str, target: str, seed: int) -> Counter[str]:
    """Writes the folder; how many training pairs of each origin it has."""
    ours, theirs = read_archive(text), read_archive(everyday)
    names = [name.removesuffix(f"-valid.{source}") for name in theirs if name.endswith(f"-valid.{source}")]
    if len(names) != 1:
        raise ValueError(f"{everyday} must hold one NAME-valid.{source}; it has {', '.join(sorted(theirs))}")
    name = names[0]
    templates = read_pairs(FOLDER / "templates.tsv")
    held_out = {
        "valid": pairs_of(ours, "valid", source, target),
        "test": pairs_of(ours, "test", source, target),
        f"{name}-valid": pairs_of(theirs, f"{name}-valid", source, target, name),
    }
    lines = {line for pairs in held_out.values() for pair in pairs for line in pair[:2]}
    lines |= set(read_lines(COPIES))
    visitors = {comparable(sentence) for sentence, _ in read_pairs(VISITORS)}

    def allowed(pair: Pair) -> bool:
        return pair.source not in lines and pair.target not in lines and comparable(pair.source) not in visitors

    pairs = [
        *pairs_of(ours, "train", source, target),
        *pairs_of(theirs, name, source, target, name),
        *(Pair(s, t, "phrases") for s, t in read_pairs(FOLDER / "phrases.tsv")),
    ]
    random = Random(seed)
    made = [
        *augmented(pairs, (name, *EVERYDAY_ORIGINS), random),
        *copies(random, COPIED_LINES),
        *filled(random, templates, FILLED_LINES),
    ]
    kept = [pair for pair in tqdm([*pairs, *dict.fromkeys(made)], desc="check", disable=None) if allowed(pair)]

    out.mkdir(parents=True, exist_ok=True)
    for split, chosen in {"train": kept, **held_out}.items():
        for suffix, column in zip((source, target, "src"), zip(*chosen, strict=True), strict=True):
            (out / f"{split}.{suffix}").write_text(
                "".join(f"{line}\n" for line in column), encoding="utf-8", newline="\n"
            )
    return Counter(pair.origin for pair in kept)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.translation.prepare", description=__doc__)
    parser.add_argument(
        "--text", type=Path, required=True, metavar="ARCHIVE", help="train, valid and test, with origins"
    )
    parser.add_argument("--everyday", type=Path, required=True, metavar="ARCHIVE", help="everyday language")
    parser.add_argument("--out", type=Path, required=True, metavar="DATA", help="the folder for train.py --data")
    parser.add_argument("--source", default="en", help="(%(default)s)")
    parser.add_argument("--target", default="de", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args(given)
    try:
        counts = prepare(options.text, options.everyday, options.out, options.source, options.target, options.seed)
    except (ValueError, OSError, tarfile.TarError) as problem:
        sys.exit(f"error: {problem}")
    for origin, count in counts.most_common():
        print(f"{count:>9,}  {origin}")


if __name__ == "__main__":
    main()
