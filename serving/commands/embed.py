"""`beamline embed`: texts as vectors."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import Any, get_args

from beamline.serving.commands.connection import asked, model_of
from beamline.serving.commands.lines import add_text_arguments, answered_or_raised, answers_of
from beamline.types import Pooling

HELP = "turn texts into vectors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--pooling", choices=get_args(Pooling), help="default: the model's")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="to length one (default: as the model says)"
    )
    parser.add_argument("--truncate", action="store_true", help="read only the beginning of a text that is too long")


def run(args: argparse.Namespace) -> int:
    options: dict[str, Any] = {**asked(args), "truncate": args.truncate}
    options |= {name: value for name in ("pooling", "normalize") if (value := getattr(args, name)) is not None}
    with ExitStack() as stack:
        model = stack.enter_context(model_of(args))
        answers = answers_of(args, lambda texts: model.embed(texts, return_errors=True, **options), stack)
        for _, answer in answered_or_raised(answers):
            # A JSON list per text; an empty one for a blank line.
            values = () if answer is None else answer.values
            print(json.dumps([float(f"{value:.8g}") for value in values]), flush=True)
    return 0
