"""`beamline embed`: texts as vectors, by a running server."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.lines import add_text_arguments, client_for, lines_of

HELP = "turn texts into vectors with a running server"

_POOLINGS = {
    "last": pb.POOLING_LAST,
    "mean": pb.POOLING_MEAN,
    "max": pb.POOLING_MAX,
    "attention": pb.POOLING_ATTENTION,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    parser.add_argument("--pooling", choices=_POOLINGS, help="default: the model's")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="to length one (default: as the model says)"
    )
    parser.add_argument("--truncate", action="store_true", help="read only the beginning of a text that is too long")


def run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        lines = lines_of(args, stack)
        client, typing = client_for(args, stack)
        for answer in client.embed(lines, lambda line: question(args, line)):
            # A JSON list per text; an empty one for a blank line.
            print(
                json.dumps([] if answer is None else [float(f"{value:.8g}") for value in answer.values]), flush=typing
            )
    return 0


def question(args: argparse.Namespace, line: str) -> pb.EmbedRequest:
    request = pb.EmbedRequest(model=args.model, version=args.version, inputs=[pb.Input(text=line)])
    request.truncate = args.truncate
    if args.pooling is not None:
        request.pooling = _POOLINGS[args.pooling]
    if args.normalize is not None:
        request.normalize = args.normalize
    return request
