"""`beamline classify`: the labels of texts."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from beamline.serving.commands.connection import asked, model_of
from beamline.serving.commands.lines import add_text_arguments, answered_or_raised, answers_of
from beamline.serving.errors import BeamlineError

HELP = "classify texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--top", type=int, default=1, metavar="N", help="labels per text (%(default)s); 0: all")
    parser.add_argument("--truncate", action="store_true", help="read only the beginning of a text that is too long")


def run(args: argparse.Namespace) -> int:
    if args.top < 0:
        raise BeamlineError(f"--top is {args.top}; it must be at least 0")
    options: dict[str, Any] = {**asked(args), "truncate": args.truncate}
    if args.top:
        options["top_k"] = args.top
    with ExitStack() as stack:
        model = stack.enter_context(model_of(args))
        answers = answers_of(args, lambda texts: model.classify(texts, return_errors=True, **options), stack)
        for _, answer in answered_or_raised(answers):
            labels = () if answer is None else answer.labels
            # One line per text, so that line n of the output belongs to line n of the input.
            print("\t".join(f"{label.name} {label.probability:.4f}" for label in labels), flush=True)
    return 0
