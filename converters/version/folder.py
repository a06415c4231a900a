"""A version's folder in a model repository: the one that the command line names, and the next one, made whole or not at
all: everything is written into a staging folder, whose manifest comes last, and the folder is then renamed."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from beamline.serving.contract.manifest import MANIFEST_FILE
from beamline.serving.errors import ConversionError

_STAGING = ".staging-"
_VERSION = re.compile(r"[1-9][0-9]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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


def free_version(name: str, repository: Path, wanted: int | None) -> int:
    if not _NAME.fullmatch(name):
        raise ConversionError(
            f"{name!r} can't be a model's name: up to 100 letters, digits, '.', '_', '-'; a letter or digit first"
        )
    if (below := _model_around(repository)) is not None:
        raise ConversionError(
            f"{repository} is no repository, but a folder of the model {below.name}: give --repo {below.parent}"
        )
    folder = repository / name
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = {int(each) for each in names if _VERSION.fullmatch(each)}
    if wanted is None:
        return max(taken, default=0) + 1
    if wanted < 1:
        raise ConversionError(f"a version is a whole number from 1 on, not {wanted}")
    if wanted in taken:
        raise ConversionError(
            f"{folder / str(wanted)} already exists; choose another --version, or none for the next one"
        )
    return wanted


def _model_around(folder: Path) -> Path | None:
    """The model whose folder this is, or a version's of it; None: it may be a repository. What lies in a model's folder
    and is no version would be a problem of the repository."""
    folder = folder.absolute()
    if (folder / MANIFEST_FILE).is_file():
        return folder.parent
    versions = [path for path in folder.iterdir() if _VERSION.fullmatch(path.name)] if folder.is_dir() else []
    return folder if any((path / MANIFEST_FILE).is_file() for path in versions) else None


@contextmanager
def staging(model: Path, version: int) -> Iterator[Path]:
    """A folder that becomes the version if all goes well, and is removed if it doesn't. A killed conversion leaves one
    that no server looks at; the next conversion of this model sweeps it away."""
    model_existed = model.is_dir()
    model.mkdir(parents=True, exist_ok=True)
    folder = model / f"{_STAGING}{os.getpid()}"
    for stale in model.glob(f"{_STAGING}*"):
        # One with our own number was left by another process: in a container, each conversion may get the same.
        if stale == folder or not _running(stale.name.removeprefix(_STAGING)):
            shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(model / str(version))
        except OSError as error:  # somebody else made this version meanwhile
            raise ConversionError(f"{model / str(version)} can't be made: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not model_existed and not any(model.iterdir()):
            model.rmdir()
        raise


def _running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
