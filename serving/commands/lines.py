"""What the commands that send texts to a server have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from beamline.serving.commands.client import FILE_BLOCK, FILE_WINDOW, Client
from beamline.serving.commands.connection import add_connection, credentials_of
from beamline.serving.errors import BeamlineError


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", metavar="TEXT", help="default: lines from standard input")
    add_connection(parser)
    parser.add_argument("--file", type=Path, metavar="F", help="read lines from a file")


def client_for(args: argparse.Namespace, stack: ExitStack) -> tuple[Client, bool]:
    """And whether somebody types: who does wants each answer before the next question."""
    typing = not args.text and args.file is None and sys.stdin.isatty()
    credentials = credentials_of(args)
    if args.file is not None:
        client = Client(args.target, FILE_WINDOW, credentials, block=FILE_BLOCK)
    else:  # in a pipe, somebody may wait for each answer
        client = Client(args.target, 1 if typing else 32, credentials)
    return stack.enter_context(client), typing


def lines_of(args: argparse.Namespace, stack: ExitStack) -> Iterable[str]:
    """The texts of the command line, or those of a file or standard input, line by line."""
    if args.text and args.file:
        raise BeamlineError("give texts or --file, not both")
    if args.text:
        if not all(text.strip() for text in args.text):
            raise BeamlineError(
                "a TEXT is empty; give words (an empty line of a file or of standard input stays empty)"
            )
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
