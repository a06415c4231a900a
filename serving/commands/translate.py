"""`beamline translate`: a client for people and for pipes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from protos import beamline_pb2 as pb
from serving.client import CallFailed, Client
from serving.commands.connection import add_connection, credentials_of
from serving.errors import BeamlineError

HELP = "translate texts with a running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", metavar="TEXT", help="default: lines from standard input")
    add_connection(parser)
    parser.add_argument("--beam", type=int, metavar="N", help="beam size (default: the model's)")
    parser.add_argument(
        "--nbest", type=int, metavar="N", help="hypotheses per text, one per line; texts are not split then"
    )
    parser.add_argument("--file", type=Path, metavar="F", help="read lines from a file")
    parser.add_argument("--scores", action="store_true", help="a score and a tab before every translation")
    parser.add_argument("--no-split", action="store_true", help="translate a text as one sentence")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even without a terminal")


def run(args: argparse.Namespace) -> int:
    if args.text and args.file:
        raise BeamlineError("give texts or --file, not both")
    for name in ("beam", "nbest"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BeamlineError(f"--{name} is {value}; it must be at least 1")
    if args.beam is not None and args.nbest is not None and args.nbest > args.beam:
        raise BeamlineError(f"--nbest is {args.nbest}; a beam of {args.beam} gives at most {args.beam}")
    with ExitStack() as stack:
        lines = _lines(args, stack)
        # Who types wants each answer before the next question.
        typing = not args.text and args.file is None and sys.stdin.isatty()
        client = stack.enter_context(Client(args.target, 1 if typing else 32, credentials_of(args)))
        answers = client.translate(lines, lambda line: question(args, line))
        quiet = not args.progress and (bool(args.text) or typing or not sys.stderr.isatty())
        refused = 0
        for number, answer in enumerate(tqdm(answers, unit=" lines", disable=quiet, file=sys.stderr), 1):
            if isinstance(answer, CallFailed):
                if args.text:
                    raise answer
                refused += 1
                tqdm.write(f"line {number}: {answer}", file=sys.stderr)
            for output in shown(answer, args.scores):
                print(output, flush=typing)
    return 1 if refused else 0


def _lines(args: argparse.Namespace, stack: ExitStack) -> Iterable[str]:
    if args.text:
        return list(args.text)
    if args.file is None:
        sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        return _stripped(sys.stdin)
    try:
        return _stripped(stack.enter_context(args.file.open(encoding="utf-8")))
    except OSError as error:
        raise BeamlineError(f"{args.file} can't be read: {error.strerror}") from error


def _stripped(lines: Iterable[str]) -> Iterator[str]:
    try:
        for line in lines:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise BeamlineError(f"the input is not UTF-8: {error}") from error


def question(args: argparse.Namespace, line: str) -> pb.TranslateRequest:
    options = pb.DecodingOptions(return_scores=args.scores)
    if args.beam is not None:
        options.beam_size = args.beam
    if args.nbest is not None:
        options.num_hypotheses = args.nbest
    options.split_sentences = not args.no_split and args.nbest in (None, 1)
    return pb.TranslateRequest(model=args.model, version=args.version, inputs=[pb.Input(text=line)], options=options)


def shown(answer: pb.Translation | CallFailed | None, scores: bool) -> list[str]:
    """What is printed for a line; an empty one where there is no answer, so that lines stay beside each other."""
    if answer is None or isinstance(answer, CallFailed):
        return [""]
    return [
        f"{hypothesis.score:.4f}\t{hypothesis.text}" if scores else hypothesis.text for hypothesis in answer.hypotheses
    ]
