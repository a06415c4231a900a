"""`beamline token`: makes a bearer token and notes its hash."""

from __future__ import annotations

import argparse
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from beamline.serving.errors import BeamlineError
from beamline.serving.security.access import Scope
from beamline.serving.security.tokens import new_token, read_tokens

HELP = "make a bearer token for a server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose token it is: letters, digits and ._-")
    parser.add_argument("--file", type=Path, required=True, metavar="TOML", help="what 'beamline serve --tokens' reads")
    parser.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        help="repeatable; admin may do everything (default: infer)",
    )
    parser.add_argument("--days", type=float, metavar="N", help="it expires then (default: never)")


def run(args: argparse.Namespace) -> int:
    """Prints the token, which is not kept anywhere."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", args.name):
        raise BeamlineError(f"{args.name!r} is no name for a token: up to 64 letters, digits and ._-")
    if args.days is not None and not 0 < args.days < 36500:
        raise BeamlineError(f"--days is {args.days:g}; it must be more than 0")
    if args.file.exists() and args.name in {entry.name for entry in read_tokens(args.file)}:
        raise BeamlineError(f"{args.file} has a token {args.name!r} already; take its entry out first")
    expires = None if args.days is None else datetime.now(UTC) + timedelta(days=args.days)
    token, entry = new_token(args.name, tuple(Scope(scope) for scope in args.scope or ["infer"]), expires)
    try:
        # Only hashes, but who reads or writes them is still the operator's business.
        with open(os.open(args.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(f"\n{entry}" if file.tell() else entry)
    except OSError as error:
        raise BeamlineError(f"{args.file} can't be written: {error.strerror}") from error
    print(token)
    return 0
