"""`beamline models`: what a repository holds, or what a running server serves, loads and unloads."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from beamline._channel import TARGET_VARIABLE, Connection, target_of
from beamline.client import Client
from beamline.serving.commands.admin import AdminClient
from beamline.serving.commands.connection import add_target, connection_of
from beamline.serving.errors import BeamlineError
from beamline.serving.models.repository import ModelVersion, newest, scan
from beamline.serving.models.settings import problems_of

HELP = "list the models of a repository, or of a running server"

_REPOSITORY = Path("model_repo")
_SERVED = ("name", "version", "state", "reason")
_COLUMNS = ("name", "versions", "task", "family", "size", "parity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repo", type=Path, metavar="DIR", help=f"a folder ({_REPOSITORY}, unless a server is named)")
    add_target(parser, "a running server instead of a folder (default: BEAMLINE_TARGET, where that is set)")
    parser.add_argument("--load", metavar="M[/V]", help="have the server load or reload it; waits for it")
    parser.add_argument("--unload", metavar="M", help="have the server unload it")


def run(args: argparse.Namespace) -> int:
    if args.target is not None and args.repo is not None:
        raise BeamlineError("give --target or --repo, not both")
    if args.target is not None or (args.repo is None and os.environ.get(TARGET_VARIABLE)):
        return _ask_server(args)
    if args.load or args.unload:
        raise BeamlineError("--load and --unload are for a running server: give --target HOST:PORT")
    return _read_folder(args.repo or _REPOSITORY)


def _ask_server(args: argparse.Namespace) -> int:
    options = connection_of(args)
    target = options["target"] = target_of(args.target)
    if args.unload or args.load:
        with AdminClient(Connection(**options)) as server:
            if args.unload:
                server.unload(args.unload)
            if args.load:
                server.load(args.load)
    with Client(**options) as client:
        rows = [(each.name, each.version, each.state, each.reason) for each in client.models()]
    print(table([_SERVED, *rows]) if rows else f"{target} serves no model")
    return 0


def _read_folder(root: Path) -> int:
    repository = scan(root)
    rows = [_row(versions) for versions in repository.models.values()]
    print(table([_COLUMNS, *rows]) if rows else f"no models in {root}")
    problems = [problem.reason for problem in repository.problems]
    for name, folder in repository.folders.items():
        problems += problems_of(folder, [version.manifest for version in repository.models.get(name, ())])
    for reason in problems:
        print(f"problem: {reason}", file=sys.stderr)
    return 1 if problems else 0


def _row(versions: tuple[ModelVersion, ...]) -> tuple[str, ...]:
    """Size and parity are the newest version's."""
    latest = newest(versions)
    return (
        latest.name,
        ", ".join(str(version.version) for version in versions),
        latest.manifest.task,
        latest.manifest.family,
        f"{_size(latest.folder) / 1e6:.1f} MB",
        _parity(latest.folder / "parity.json"),
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _parity(path: Path) -> str:
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"))
        if "label_exact_share" in certificate:  # of a model that classifies or embeds
            difference, share = float(certificate["max_difference"]), float(certificate["label_exact_share"])
            return f"values within {difference:.1e}, {share:.1%} label-exact"
        difference = float(certificate["max_log_prob_difference"])
        share = float(certificate["beam_exact_share"])
    except FileNotFoundError:
        return "none"
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"
    return f"log-probs within {difference:.1e}, {share:.1%} beam-exact"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
