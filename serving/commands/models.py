"""`beamline models`: what a repository holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.repository import ModelVersion, newest, scan

HELP = "list the models of a repository"

_COLUMNS = ("name", "versions", "task", "family", "size", "parity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repo", type=Path, default=Path("model_repo"), metavar="DIR", help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    repository = scan(args.repo)
    rows = [_row(versions) for versions in repository.models.values()]
    print(table([_COLUMNS, *rows]) if rows else f"no models in {args.repo}")
    for problem in repository.problems:
        print(f"problem: {problem.reason}", file=sys.stderr)
    return 1 if repository.problems else 0


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
