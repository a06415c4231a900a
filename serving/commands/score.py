"""`beamline score`: how likely a model finds given texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack

from beamline.serving.commands.connection import add_languages, asked, languages_of, model_of
from beamline.serving.commands.lines import add_text_arguments, answered_or_raised, answers_of
from beamline.types import Score

HELP = "score texts: log-probability, perplexity and the text, by line"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_languages(parser)
    parser.add_argument("--source", metavar="TEXT", help="what the texts translate, for a model that translates")
    parser.add_argument("--tokens", action="store_true", help="and a line for each token")


def run(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        model = stack.enter_context(model_of(args))
        options = {**asked(args), **languages_of(args)}
        answers = answers_of(
            args, lambda texts: model.score(texts, source=args.source, return_errors=True, **options), stack
        )
        for text, answer in answered_or_raised(answers):
            # An empty line for an empty line, so that they stay beside each other.
            print("" if answer is None else "\n".join(shown(text, answer, args.tokens)), flush=True)
    return 0


def shown(text: str, score: Score, tokens: bool) -> Iterator[str]:
    yield f"{score.log_prob:.4f}\t{score.perplexity:.4f}\t{text}"
    for token in score.tokens if tokens else ():
        yield f"  {'-' if token.log_prob is None else f'{token.log_prob:.4f}'}\t{token.piece}"
