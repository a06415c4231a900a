"""`beamline generate`: what a language model says, as it says it."""

from __future__ import annotations

import argparse
import sys

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.client import Client
from beamline.serving.commands.connection import add_connection, credentials_of
from beamline.serving.errors import BeamlineError

HELP = "continue a prompt with a running server's language model"

# Command line name -> field of the options; the server checks the values.
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
        parser.add_argument(_flag(name), type=int, metavar="N", help=text)
    for name, text in _REAL.items():
        parser.add_argument(_flag(name), type=float, metavar="X", help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on until --max-tokens")
    parser.add_argument("--echo", action="store_true", help="the prompt first")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    request = question(args, _prompt(args))
    answers = [""] * max(1, args.n)
    with Client(args.target, credentials=credentials_of(args)) as client:
        for reply in client.generate(request):
            if args.n == 1:
                print(reply.text, end="", flush=True)
            else:  # side by side they can't be shown as they come
                answers[reply.index] += reply.text
    if args.n == 1:
        print()
    else:
        print(*(f"--- {number} of {args.n}\n{answer}" for number, answer in enumerate(answers, 1)), sep="\n")
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BeamlineError(f"the input is not UTF-8: {error}") from error


def question(args: argparse.Namespace, prompt: str) -> pb.GenerateRequest:
    options = pb.GenerationOptions(n=args.n, stop=args.stop, ignore_eos=args.ignore_eos, echo=args.echo)
    for name in (*_WHOLE, *_REAL):
        value = getattr(args, name)
        if value is None:
            continue
        try:
            setattr(options, name, value)
        except ValueError as error:
            raise BeamlineError(f"{_flag(name)} is {value}: {error}") from error
    request = pb.GenerateRequest(model=args.model, version=args.version, options=options)
    if args.system is not None and not args.chat:
        raise BeamlineError("--system needs --chat")
    if args.chat:
        if args.system is not None:
            request.chat.messages.add(role="system", content=args.system)
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request
