"""`beamline classify`: the labels of texts, by a running server."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.lines import add_text_arguments, client_for, lines_of
from beamline.serving.errors import BeamlineError

HELP = "classify texts with a running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--top", type=int, default=1, metavar="N", help="labels per text (%(default)s); 0: all")
    parser.add_argument("--truncate", action="store_true", help="read only the beginning of a text that is too long")


def run(args: argparse.Namespace) -> int:
    if args.top < 0:
        raise BeamlineError(f"--top is {args.top}; it must be at least 0")
    with ExitStack() as stack:
        lines = lines_of(args, stack)
        client, typing = client_for(args, stack)
        for answer in client.classify(lines, lambda line: question(args, line)):
            labels = [] if answer is None else answer.labels
            # One line per text, so that line n of the output belongs to line n of the input.
            print("\t".join(f"{label.name} {label.probability:.4f}" for label in labels), flush=typing)
    return 0


def question(args: argparse.Namespace, line: str) -> pb.ClassifyRequest:
    request = pb.ClassifyRequest(model=args.model, version=args.version, inputs=[pb.Input(text=line)])
    request.truncate = args.truncate
    if args.top:
        request.top_k = args.top
    return request
