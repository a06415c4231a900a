"""`beamline generate`: what a language model says, as it says it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from beamline.client import Client
from beamline.serving.commands.connection import add_connection, asked, model_of
from beamline.serving.errors import BeamlineError
from beamline.types import GenerationPiece, Message

if TYPE_CHECKING:
    from beamline.in_process import LoadedModel

HELP = "continue a prompt with a language model"

# Names of options and what they do; the model checks the values.
_WHOLE = {
    "max_tokens": "at most so many tokens",
    "beam_size": "beam search",
    "top_k": "sample from the likeliest N",
    "seed": "the same one gives the same samples",
}
_REAL = {
    "temperature": "0: the likeliest token; above: sampling",
    "top_p": "sample from the likeliest that have this much together",
    "min_p": "and from none less likely than this share of the likeliest",
    "repetition_penalty": "above 1: say nothing twice",
    "presence_penalty": "the same, subtracted once",
    "frequency_penalty": "the same, for every time",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="default: standard input")
    add_connection(parser)
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says in a talk")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the model is told before")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="answers (%(default)s)")
    for name, text in _WHOLE.items():
        also = ["--beam"] if name == "beam_size" else []  # as `beamline translate` has it
        parser.add_argument(_flag(name), *also, type=int, metavar="N", help=text)
    for name, text in _REAL.items():
        parser.add_argument(_flag(name), type=float, metavar="X", help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on until --max-tokens")
    parser.add_argument("--echo", action="store_true", help="the prompt first")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    prompt, options = _prompt(args), options_of(args)
    answers = [""] * max(1, args.n)
    with model_of(args) as model, closing(_pieces(model, args, prompt, options)) as pieces:
        for piece in pieces:
            if args.n == 1:
                print(piece.text, end="", flush=True)
            else:  # side by side they can't be shown as they come
                answers[piece.index] += piece.text
    if args.n == 1:
        print()
    else:
        print(*(f"--- {number} of {args.n}\n{answer}" for number, answer in enumerate(answers, 1)), sep="\n")
    return 0


def _pieces(
    model: Client | LoadedModel, args: argparse.Namespace, prompt: str, options: dict[str, Any]
) -> Generator[GenerationPiece, None, None]:
    if not args.chat:
        return model.generate_stream(prompt, **options)
    before = [] if args.system is None else [Message("system", args.system)]
    return model.chat_stream([*before, Message("user", prompt)], **options)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BeamlineError(f"the input is not UTF-8: {error}") from error


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    if args.system is not None and not args.chat:
        raise BeamlineError("--system needs --chat")
    options = {**asked(args), "n": args.n, "stop": args.stop, "ignore_eos": args.ignore_eos, "echo": args.echo}
    return options | {name: value for name in (*_WHOLE, *_REAL) if (value := getattr(args, name)) is not None}
