"""`beamline translate`: for people and for pipes."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from beamline.serving.commands.connection import add_languages, asked, languages_of, model_of
from beamline.serving.commands.lines import add_text_arguments, answers_of, sentence_of
from beamline.serving.errors import BeamlineError
from beamline.types import Translation

HELP = "translate texts"


# Names of options, and what they do; the model checks the values.
_SAMPLING: dict[str, tuple[type[int] | type[float], str]] = {
    "temperature": (float, "0: the likeliest translation; above: sampling"),
    "top_k": (int, "sample from the likeliest X tokens"),
    "top_p": (float, "sample from the likeliest that have this much together"),
    "min_p": (float, "and from none less likely than this share of the likeliest"),
    "seed": (int, "the same one gives the same samples"),
}
_SEARCH: dict[str, tuple[type[int] | type[float], str]] = {
    "length_penalty": (float, "above 0: longer translations; below: shorter ones"),
    "max_length": (int, "at most so many tokens, with those at the start and the end"),
    "no_repeat_ngram_size": (int, "no X tokens twice in this order; 0: off"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_languages(parser)
    parser.add_argument("--beam", "--beam-size", type=int, metavar="N", help="beam size (default: the model's)")
    parser.add_argument(
        "--nbest", type=int, metavar="N", help="hypotheses per text, one per line; texts are not split then"
    )
    for name, (kind, text) in _SEARCH.items():
        said = f"{text} (default: the model's)"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=said)
    sampling = parser.add_argument_group("sampling", "translations that are drawn; --nbest says how many")
    for name, (kind, text) in _SAMPLING.items():
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=text)
    parser.add_argument("--scores", action="store_true", help="a score and a tab before every translation")
    parser.add_argument(
        "--target-prefix", metavar="TEXT", help="every translation begins with it; no text is split then"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this; repeatable")
    parser.add_argument("--no-split", action="store_true", help="translate a text as one sentence")


def run(args: argparse.Namespace) -> int:
    for name in ("beam", "nbest"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BeamlineError(f"--{name} is {value}; it must be at least 1")
    if args.beam is not None and args.nbest is not None and args.nbest > args.beam:
        raise BeamlineError(f"--nbest is {args.nbest}; a beam of {args.beam} gives at most {args.beam}")
    options = options_of(args)
    with ExitStack() as stack:
        model = stack.enter_context(model_of(args))
        refused = 0
        answers = answers_of(args, lambda texts: model.translate(texts, return_errors=True, **options), stack)
        for number, (_, answer) in enumerate(answers, 1):
            if isinstance(answer, BeamlineError):
                if args.text:
                    raise BeamlineError(sentence_of(answer))
                refused += 1
                tqdm.write(f"line {number}: {sentence_of(answer)}", file=sys.stderr)
            for output in shown(answer, args.scores):
                print(output, flush=True)
    return 1 if refused else 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    split = not args.no_split and args.nbest in (None, 1) and args.target_prefix is None
    options = {**asked(args), **languages_of(args), "split_sentences": split}
    if args.scores:
        options["return_scores"] = True
    if args.beam is not None:
        options["beam_size"] = args.beam
    options |= {name: value for name in (*_SEARCH, *_SAMPLING) if (value := getattr(args, name)) is not None}
    if args.target_prefix is not None:
        options["target_prefix"] = args.target_prefix
    if args.stop is not None:
        options["stop"] = args.stop
    if args.nbest is not None:
        options["num_hypotheses"] = args.nbest
    return options


def shown(answer: Translation | BeamlineError | None, scores: bool) -> list[str]:
    """What is printed for a line; an empty one where there is no answer, so that lines stay beside each other."""
    if answer is None or isinstance(answer, BeamlineError):
        return [""]
    return [
        f"{hypothesis.score:.4f}\t{hypothesis.text}" if scores else hypothesis.text for hypothesis in answer.hypotheses
    ]
