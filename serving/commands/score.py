"""`beamline score`: how likely a model finds given texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

from beamline.protos import beamline_pb2 as pb
from beamline.serving.commands.client import Client
from beamline.serving.commands.connection import add_connection, add_languages, credentials_of, languages_of
from beamline.serving.errors import BeamlineError

HELP = "score texts with a running server: log-probability, perplexity and the text, by line"

_AT_ONCE = 32  # texts of one call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", metavar="TEXT", help="default: lines from standard input")
    add_connection(parser)
    add_languages(parser)
    parser.add_argument("--source", metavar="TEXT", help="what the texts translate, for a model that translates")
    parser.add_argument("--tokens", action="store_true", help="and a line for each token")


def run(args: argparse.Namespace) -> int:
    with Client(args.target, credentials=credentials_of(args)) as client:
        texts = iter(args.text) if args.text else _lines()
        while batch := list(islice(texts, _AT_ONCE)):
            # An empty line for an empty line, so that they stay beside each other; but who types an empty text is told.
            asked = batch if args.text else [text for text in batch if text.strip()]
            scores = iter(client.score(question(args, asked)).scores if asked else ())
            for text in batch:
                print("\n".join(shown(text, next(scores), args.tokens)) if args.text or text.strip() else "")
    return 0


def _lines() -> Iterator[str]:
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise BeamlineError(f"the input is not UTF-8: {error}") from error


def question(args: argparse.Namespace, texts: Sequence[str]) -> pb.ScoreRequest:
    sources = [] if args.source is None else [pb.Input(text=args.source)]
    return pb.ScoreRequest(
        model=args.model,
        version=args.version,
        sources=sources,
        texts=[pb.Input(text=text) for text in texts],
        **languages_of(args),
    )


def shown(text: str, score: pb.ScoredText, tokens: bool) -> Iterator[str]:
    yield f"{score.log_prob:.4f}\t{score.perplexity:.4f}\t{text}"
    for token in score.tokens if tokens else ():
        yield f"  {token.log_prob:.4f}\t{token.piece}" if token.HasField("log_prob") else f"  -\t{token.piece}"
