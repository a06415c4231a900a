"""`beamline eval`: how good a model's translations are, against references."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from beamline.client import Client
from beamline.serving.commands.connection import add_connection, add_languages, asked, languages_of, model_of
from beamline.serving.commands.lines import blocks_of, progress, sentence_of, two_at_a_time
from beamline.serving.errors import BeamlineError
from beamline.types import Translation
from beamline.version import install_hint

if TYPE_CHECKING:
    from beamline.in_process import LoadedModel

HELP = "measure translation quality (BLEU, chrF) against references"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, required=True, metavar="F", help="the lines to translate")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="their translations, line by line")
    parser.add_argument("--beam", "--beam-size", type=int, metavar="N", help="beam size (default: the model's)")
    parser.add_argument("--output", type=Path, metavar="F", help="write the translations there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_languages(parser)
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    bleu, chrf = _metrics()
    sources, references = _lines(args.source), _lines(args.reference)
    if len(sources) != len(references):
        raise BeamlineError(
            f"{args.source} has {len(sources)} lines and {args.reference} has {len(references)}; they must go together"
        )
    if not sources:
        raise BeamlineError(f"{args.source} is empty")
    with model_of(args) as model:  # loaded, where it is in this process
        began = time.monotonic()
        translations, refused = _translate(model, args, sources)
        seconds = time.monotonic() - began
    if args.output is not None:
        args.output.write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    scores = [metric.corpus_score(translations, [references]) for metric in (bleu, chrf)]
    found = {
        "lines": len(sources),
        "refused": refused,
        "bleu": round(scores[0].score, 2),
        "chrf": round(scores[1].score, 2),
        "seconds": round(seconds, 2),
        "signatures": [str(metric.get_signature()) for metric in (bleu, chrf)],
    }
    print(json.dumps(found) if args.json else _table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    refused = f", {found['refused']} of them refused and counted as empty" if found["refused"] else ""
    return "\n".join(
        [
            f"BLEU  {found['bleu']:.2f}  ({found['signatures'][0]})",
            f"chrF  {found['chrf']:.2f}  ({found['signatures'][1]})",
            f"{found['lines']} lines in {found['seconds']:.1f} s, {found['lines'] / found['seconds']:.1f}/s{refused}",
        ]
    )


def _metrics() -> tuple[Any, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise BeamlineError(f"this needs sacrebleu: {install_hint('eval')}") from None
    return BLEU(), CHRF()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BeamlineError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BeamlineError(f"{path} is not UTF-8: {error}") from error


def _translate(model: Client | LoadedModel, args: argparse.Namespace, sources: Sequence[str]) -> tuple[list[str], int]:
    options = {**asked(args), **languages_of(args), "split_sentences": True}
    if args.beam is not None:
        options["beam_size"] = args.beam
    translations: list[str] = []
    refused = 0
    answers = two_at_a_time(lambda texts: model.translate(texts, return_errors=True, **options), blocks_of(sources))
    shown = progress(answers, total=len(sources), disable=not sys.stderr.isatty())
    for number, (_, answer) in enumerate(shown, 1):
        if isinstance(answer, BeamlineError):
            refused += 1
            tqdm.write(f"line {number}: {sentence_of(answer)}", file=sys.stderr)
        translations.append(answer.text if isinstance(answer, Translation) else "")
    return translations, refused
