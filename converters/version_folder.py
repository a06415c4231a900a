"""A version that stands in a repository, named on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from beamline.serving.errors import ConversionError


def add_version_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="its name; NAME/VERSION for another than the newest")
    parser.add_argument("--repo", type=Path, default=Path("model_repo"), help="model repository (default: model_repo)")


def version_folder(repository: Path, model: str) -> Path:
    name, _, version = model.partition("/")
    folder = repository / name
    versions = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []
    if "/" in version or not versions or (version and version not in map(str, versions)):
        there = f"it has {', '.join(map(str, versions))}" if versions else f"there is no {folder}"
        raise ConversionError(f"there is no model {model} in {repository}: {there}")
    return folder / (version or str(versions[-1]))
