"""The models on disk: `<root>/<name>/<version>/manifest.json`.

A root may also be a single model (`<root>/<version>/manifest.json`) or a single version (`<root>/manifest.json`), as
storage initializers of Kubernetes leave them: a repository of that one, whose name is its manifest's or a given one.

A broken model is reported in a sentence that names the file, and never keeps the others from being served.
Requests never reach this module: their model names are only looked up among what is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from beamline.serving.contract.files import open_regular
from beamline.serving.contract.manifest import MANIFEST_FILE, AnyManifest, read_any_manifest
from beamline.serving.errors import ManifestError, ModelError, ModelNotFound

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_AGAIN = ": copy the version again, or convert it again"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    folder: Path
    manifest: AnyManifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something in the repository can't be served."""

    model: str
    reason: str  # a sentence; it names the file
    version: str = ""  # the folder of the version; empty where it is the model's own


@dataclass(frozen=True, slots=True)
class Repository:
    root: Path
    models: Mapping[str, tuple[ModelVersion, ...]]  # by name; versions ascending, never empty
    problems: tuple[Problem, ...]
    folders: Mapping[str, Path]  # of all models, those without a usable version too


def newest(versions: tuple[ModelVersion, ...]) -> ModelVersion:
    return max(versions, key=lambda version: version.version)


def is_version(folder: str) -> bool:
    """Whether a folder of this name is that of a version."""
    return _VERSION.fullmatch(folder) is not None


def model_folders(root: Path, name: str | None = None) -> dict[str, Path]:
    """By the models' names. `name`: of the only model, where its manifest's is not wanted. Raises `OSError`, and
    `ModelError` where there are several models for one name."""
    folders = list(_subfolders(root))
    only = [root, *reversed([folder for folder in folders if _VERSION.fullmatch(folder.name)])]
    if _any_manifest(only):
        return {name or _name_in(only) or root.absolute().name: root}
    if name is not None and len(folders) == 1:
        return {name: folders[0]}
    if name is not None and folders:
        raise ModelError(f"{root} has several models, and --model-name is for one: leave it away, or give one's folder")
    return {folder.name: folder for folder in folders}


def scan(root: Path, name: str | None = None) -> Repository:
    """Reads every manifest, but no weights: `verify` does that. `name` is that of the only model."""
    models: dict[str, tuple[ModelVersion, ...]] = {}
    problems: list[Problem] = []
    try:
        folders = model_folders(root, name)
    except OSError as error:
        raise ModelError(f"the model repository {root} can't be read: {error.strerror}") from error
    for model, folder in folders.items():
        versions: list[ModelVersion] = []
        try:
            lone = (folder / MANIFEST_FILE).is_file() and folder == root
            entries = [folder] if lone else list(_subfolders(folder))
            hint = "" if lone else _checkpoint(folder)
        except OSError as error:
            problems.append(Problem(model, f"{folder} can't be read: {error.strerror}"))
            continue
        if hint:
            problems.append(Problem(model, f"{folder} has no version folder{hint}"))
            continue
        folder_name = folder.name if folder != root else None if name is not None else model
        for entry in entries:
            try:
                found = _read(entry) if lone else _read_version(entry, folder_name)
                versions.append(found if name is None else _named(found, name))
            except ModelError as error:
                problems.append(Problem(model, str(error), "" if lone else entry.name))
            except OSError as error:
                problems.append(Problem(model, f"{entry} can't be read: {error.strerror}", "" if lone else entry.name))
        if versions:
            models[model] = tuple(sorted(versions, key=lambda version: version.version))
        elif not entries:
            problems.append(Problem(model, f"{folder} has no version folder"))
    if not models and root not in folders.values() and (hint := _checkpoint(root)):
        raise ModelError(f"{root} is no model repository{hint}")
    return Repository(root, models, tuple(problems), folders)


def _any_manifest(folders: list[Path]) -> bool:
    """Whether one of them has a manifest. Raises `OSError` where none is seen, and not all could be looked into."""
    failure: OSError | None = None
    for folder in folders:
        try:
            if (folder / MANIFEST_FILE).is_file():
                return True
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    return False


def _name_in(folders: list[Path]) -> str | None:
    """The model's name in the first manifest that can be read."""
    for folder in folders:
        with suppress(ModelError, OSError):
            return read_any_manifest(folder).name
    return None


def find(path: Path, version: int | None = None, among: Collection[int] | None = None) -> ModelVersion:
    """A version of one model: `path` is a model's folder, whose newest is meant where none is named, or a version's.
    `among`: the versions that may be meant where none is named. Raises `ModelNotFound` or `ModelError`."""
    path = Path(os.path.abspath(path))  # a name to compare with the manifest's, also where the path is "."
    try:
        return _find(path, version, among)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error


def _find(path: Path, version: int | None, among: Collection[int] | None) -> ModelVersion:
    if not path.is_dir():
        raise ModelNotFound(f"there is no folder {path}{_beside(path)}")
    if (path / MANIFEST_FILE).exists():
        found = _read_version(path, path.parent.name) if _VERSION.fullmatch(path.name) else _read(path)
        if version not in (None, found.version):
            raise ModelNotFound(f"{path} is one version, and version {version} was asked for: give the folder above it")
        return found
    present = sorted(int(each.name) for each in _subfolders(path) if _VERSION.fullmatch(each.name))
    if not present:
        inside = [each.name for each in _subfolders(path) if any(_VERSION.fullmatch(e.name) for e in _subfolders(each))]
        hint = f": it is a repository, give one of its models: {', '.join(inside)}" if inside else ""
        raise ModelNotFound(f"{path} has no version folder{_checkpoint(path) or hint}")
    if version is not None and version not in present:
        raise ModelNotFound(f"{path} has no version {version}; there is {', '.join(map(str, present))}")
    usual = [each for each in present if among is None or each in among] or present
    return _read_version(path / str(usual[-1] if version is None else version), path.name)


def _checkpoint(folder: Path) -> str:
    """What to do with a folder that is no model yet; empty where it is something else."""
    if not (folder / "config.json").exists() or any(_VERSION.fullmatch(each.name) for each in _subfolders(folder)):
        return ""
    name = folder.absolute().name.lower()
    return f": it is a checkpoint, convert it first: beamline convert {folder} --name {name}"


def _beside(path: Path) -> str:
    """What else there is, for whoever mistyped a name."""
    try:
        names = [each.name for each in _subfolders(path.parent)]
    except OSError:
        return ""
    return f"; beside it there is {', '.join(names[:20])}" if names else ""


def _subfolders(folder: Path) -> Iterator[Path]:
    """Sorted. Hidden ones are left out: a conversion that is under way, or `.git`, is not a model."""
    return (entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith("."))


def _read(folder: Path) -> ModelVersion:
    """A version in a folder of any name."""
    return ModelVersion(folder, read_any_manifest(folder))


def _named(version: ModelVersion, name: str) -> ModelVersion:
    return ModelVersion(version.folder, version.manifest.model_copy(update={"name": name}))


def _read_version(folder: Path, name: str | None) -> ModelVersion:
    """`name`: what the manifest must say; None: anything."""
    if not _VERSION.fullmatch(folder.name):
        raise ModelError(f"{folder} is not a version: a version is a positive whole number")
    if not (folder / MANIFEST_FILE).exists():
        raise ModelError(f"{folder / MANIFEST_FILE} does not exist: the version is incomplete")
    manifest = read_any_manifest(folder)
    expected = (name or manifest.name, int(folder.name))
    if (manifest.name, manifest.version) != expected:
        raise ManifestError(
            f"{folder / MANIFEST_FILE} says it is {manifest.name} version {manifest.version}, "
            f"but lies in the folder of {expected[0]} version {expected[1]}"
        )
    return ModelVersion(folder, manifest)


def verify(folder: Path, manifest: AnyManifest) -> None:
    """Every file that the manifest names is there and has the content that was written. Reads all of it."""
    weights = manifest.weights
    hashes = {file.file: file.sha256 for file in manifest.files}
    for name in hashes:
        if not name or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
            raise ManifestError(f"{folder / MANIFEST_FILE} names the file {name!r}, which is no plain file name")
        try:
            open_regular(folder / name).close()
        except FileNotFoundError:
            raise ModelError(f"{folder / name} does not exist, but the manifest names it") from None
        except OSError as error:
            raise ModelError(f"{folder / name} can't be read: {error.strerror}") from error
    try:
        size = (folder / weights.file).stat().st_size
    except OSError as error:  # it was there a moment ago
        raise ModelError(f"{folder / weights.file} can't be read: {error.strerror}") from error
    if size != weights.bytes:
        raise ModelError(f"{folder / weights.file} has {size} bytes; the manifest says {weights.bytes}{_AGAIN}")
    for name, expected in hashes.items():
        if _sha256(folder / name) != expected:
            raise ModelError(f"{folder / name} is corrupt: its sha256 is not the manifest's{_AGAIN}")


def _sha256(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
