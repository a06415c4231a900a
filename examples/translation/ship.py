"""From a training run to a shipped model: convert, measure, choose the precision, and write the figures into the card.

    python -m examples.translation.ship en-de --run OUT --data DATA

DATA holds test.SOURCE, test.TARGET, valid.SOURCE and what the settings validate beside it. The repository's model
folder must have a card, README.md, with the marks of card.py. The older versions of the model are removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from examples.translation.card import Quality, Training, figures, has, replaced, sentence_table
from examples.translation.curve import drawing, points
from examples.translation.data import load_vocabulary, read_lines
from examples.translation.evaluate import quality_of, translate
from examples.translation.first_words import (
    COPIES,
    SEEN,
    VISITORS,
    copies_summary,
    read_judgements,
    read_pairs,
    visitors_table,
)
from examples.translation.models import CONFIG, VOCABULARY, load
from examples.translation.settings import Settings
from examples.translation.trainer import LOG

HERE = Path(__file__).parent
SENTENCES = HERE / "sentences.txt"
BEAMS = (1, 4)
FLOAT, EIGHT_BITS, PYTORCH = "float weights", "8-bit weights", "the PyTorch checkpoint's own search"
PRECISIONS = {FLOAT: "float32", EIGHT_BITS: "int8"}
MAY_COST = 0.3  # BLEU, of 8-bit weights
MOST_MEGABYTES = 15.0


def beamline(*arguments: str | Path) -> str:
    """Its standard output; what it says otherwise is shown."""
    command = [sys.executable, "-m", "beamline.serving.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def prepare(run: Path, settings: Settings, folder: Path) -> Path:
    """The run's checkpoint in half precision, with what the settings say of serving it."""
    shutil.copytree(run / "checkpoint-fp16", folder, ignore=shutil.ignore_patterns("*.tmp"))
    described = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | settings.served()
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder


def convert(checkpoint: Path, name: str, version: int, typical: Path, work: Path) -> dict[str, Path]:
    """A repository for each precision. `typical`: text by which 8-bit activations get their scales."""
    repositories = {}
    for label, precision in PRECISIONS.items():
        repositories[label] = work / precision
        where = ("--name", name, "--version", str(version), "--repo", repositories[label])
        how = ("--precision", precision, *(("--calibrate", typical) if precision == "int8" else ()))
        print(beamline("convert", checkpoint, *where, *how), end="", flush=True)
    return repositories


def typical_text(data: Path, settings: Settings, work: Path) -> Path:
    """Lines of all kinds that the model is validated with, in turns."""
    kinds = [read_lines(data / f"{name}.{settings.source}") for name in ("valid", *settings.also_validate)]
    file = work / "typical"
    file.write_text("".join(f"{line}\n" for lines in zip(*kinds, strict=False) for line in lines), encoding="utf-8")
    return file


def measure(label: str, repository: Path, source: Path, reference: Path) -> dict[int, Quality]:
    measured = {}
    for beam in BEAMS:
        files = ("--source", source, "--reference", reference)
        found = json.loads(beamline("eval", "--repo", repository, *files, "--beam", str(beam), "--json"))
        measured[beam] = Quality(found["bleu"], found["chrf"])
        print(f"{label}, beam {beam}: {measured[beam]}", flush=True)
    return measured


def measure_pytorch(checkpoint: Path, source: Path, reference: Path) -> dict[int, Quality]:
    model, vocabulary = load(checkpoint).eval(), load_vocabulary(checkpoint / VOCABULARY)
    found = {}
    for beam in BEAMS:
        answers = translate(model, vocabulary, read_lines(source), beam)
        found[beam] = quality_of(answers, read_lines(reference))
        print(f"{PYTORCH}, beam {beam}: {found[beam]}", flush=True)
    return found


def chosen(measured: Mapping[str, Mapping[int, Quality]]) -> str:
    best = BEAMS[-1]
    lost = measured[FLOAT][best].bleu - measured[EIGHT_BITS][best].bleu
    return EIGHT_BITS if lost < MAY_COST else FLOAT


def translations(repository: Path, sentences: list[str], work: Path) -> list[str]:
    """By the model's own defaults, through a server."""
    sources, out = work / "sentences", work / "sentences.out"
    sources.write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")
    beamline("eval", "--repo", repository, "--source", sources, "--reference", sources, "--output", out)
    return read_lines(out)


def first_words(card: str, repository: Path, work: Path) -> str:
    """The card with what the model makes of them, where it has places for that."""
    if has(card, "visitors"):
        sentences = [sentence for sentence, _ in read_pairs(VISITORS)]
        found = translations(repository, sentences, work)
        table = visitors_table(sentences, found, read_judgements(), frozenset(read_lines(SEEN)))
        card = replaced(card, "visitors", table)
    if has(card, "copies"):
        strings = read_lines(COPIES)
        card = replaced(card, "copies", copies_summary(strings, translations(repository, strings, work)))
    return card


def next_version(model: Path) -> int:
    return max((int(each.name) for each in model.iterdir() if each.name.isdecimal()), default=0) + 1


def size_of(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def ship(
    name: str, run: Path, data: Path, repository: Path, settings: Settings, checkpoints: Path, precision: str | None
) -> None:
    """`precision`: not what its quality would allow, but this one."""
    model, training = repository / name, Training.read(run / LOG)
    card = (model / "README.md").read_text(encoding="utf-8")
    sides = settings.source, settings.target
    test, *others = ([data / f"{name}.{side}" for side in sides] for name in ("test", *settings.also_validate))
    version = next_version(model)
    curve = drawing(points(run / LOG), f"{name}: BLEU on {settings.bleu_lines} validation lines, greedy")
    with tempfile.TemporaryDirectory(prefix="ship-") as folder:
        work = Path(folder)
        checkpoint = prepare(run, settings, work / "checkpoint")
        repositories = convert(checkpoint, name, version, typical_text(data, settings, work), work)
        measured = {label: measure(label, each, *test) for label, each in repositories.items()}
        measured[PYTORCH] = measure_pytorch(checkpoint, *test)
        asked = {stored: label for label, stored in PRECISIONS.items()}
        served = asked[precision] if precision else chosen(measured)
        made = repositories[served] / name / str(version)
        elsewhere = {
            f"{len(read_lines(source)):,} lines of {source.stem}": measure(
                source.stem, repositories[served], source, reference
            )
            for source, reference in others
        }
        lines = len(read_lines(test[0]))
        card = replaced(card, "figures", figures(lines, measured, served, size_of(made), training, elsewhere))
        sentences = read_lines(SENTENCES)
        found = translations(repositories[served], sentences, work)
        card = replaced(card, "sentences", sentence_table(sentences, found))
        card = first_words(card, repositories[served], work)
        # All is measured: now it may replace what was there.
        if size_of(made) > MOST_MEGABYTES:
            print(f"warning: {size_of(made):.1f} MB, above {MOST_MEGABYTES:g}", file=sys.stderr)
        shutil.copytree(made, model / str(version))
        for old in (each for each in model.iterdir() if each.name.isdecimal() and int(each.name) < version):
            shutil.rmtree(old)
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        shutil.copytree(checkpoint, checkpoints / name)
    (model / "curve.svg").write_text(curve, encoding="utf-8")
    (model / "README.md").write_text(card, encoding="utf-8")
    print(f"shipped {model / str(version)}: {served}, {size_of(model / str(version)):.1f} MB")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.translation.ship", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="the model's, which has NAME.json beside this file")
    parser.add_argument("--run", type=Path, required=True, metavar="OUT", help="what train.py wrote")
    parser.add_argument("--data", type=Path, required=True, metavar="DATA", help="holds test and valid")
    parser.add_argument("--repo", type=Path, default=Path("model_repo"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, if not NAME.json")
    parser.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints", metavar="DIR")
    parser.add_argument("--precision", choices=PRECISIONS.values(), help="(default: int8, where it costs little BLEU)")
    options = parser.parse_args(given)
    settings = Settings.read(options.config or HERE / f"{options.name}.json")
    try:
        where = options.run, options.data, options.repo
        ship(options.name, *where, settings, options.checkpoints, options.precision)
    except (ValueError, OSError, subprocess.CalledProcessError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
