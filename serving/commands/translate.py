"""`beamline translate`: a client for people and for pipes."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from tqdm import tqdm

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.client import CallFailed
from beamline.serving.commands.connection import add_languages, languages_of
from beamline.serving.commands.lines import add_text_arguments, client_for, lines_of
from beamline.serving.errors import BeamlineError

HELP = "translate texts with a running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_languages(parser)
    parser.add_argument("--beam", type=int, metavar="N", help="beam size (default: the model's)")
    parser.add_argument(
        "--nbest", type=int, metavar="N", help="hypotheses per text, one per line; texts are not split then"
    )
    parser.add_argument("--scores", action="store_true", help="a score and a tab before every translation")
    parser.add_argument("--no-split", action="store_true", help="translate a text as one sentence")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even without a terminal")


def run(args: argparse.Namespace) -> int:
    for name in ("beam", "nbest"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BeamlineError(f"--{name} is {value}; it must be at least 1")
    if args.beam is not None and args.nbest is not None and args.nbest > args.beam:
        raise BeamlineError(f"--nbest is {args.nbest}; a beam of {args.beam} gives at most {args.beam}")
    with ExitStack() as stack:
        lines = lines_of(args, stack)
        client, typing = client_for(args, stack)
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


def question(args: argparse.Namespace, line: str) -> pb.TranslateRequest:
    options = pb.DecodingOptions(return_scores=args.scores)
    if args.beam is not None:
        options.beam_size = args.beam
    if args.nbest is not None:
        options.num_hypotheses = args.nbest
    options.split_sentences = not args.no_split and args.nbest in (None, 1)
    return pb.TranslateRequest(
        model=args.model, version=args.version, inputs=[pb.Input(text=line)], options=options, **languages_of(args)
    )


def shown(answer: pb.Translation | CallFailed | None, scores: bool) -> list[str]:
    """What is printed for a line; an empty one where there is no answer, so that lines stay beside each other."""
    if answer is None or isinstance(answer, CallFailed):
        return [""]
    return [
        f"{hypothesis.score:.4f}\t{hypothesis.text}" if scores else hypothesis.text for hypothesis in answer.hypotheses
    ]
