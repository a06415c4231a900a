"""A repository in an object store (s3://, gs://) or on a web server (https://), kept as a copy in a local folder.

A version is copied elsewhere, checked against its manifest's hashes, and renamed into its place: the copy only ever has
whole versions, and what is wrong in the store leaves it as it was. Everything else, `--watch` too, works on the copy.
A version is known by its manifest, which has the hashes of all its files: as long as that is the same, nothing is read
again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from beamline.serving.contract.manifest import MANIFEST_FILE, read_any_manifest
from beamline.serving.errors import ModelError
from beamline.serving.models.repository import verify
from beamline.serving.models.settings import SETTINGS_FILE

log = logging.getLogger(__name__)

SCHEMES = ("s3", "gs", "https", "http")
_EXTRAS = {"s3": "remote", "https": "remote", "http": "remote", "gs": "gs"}
_DEPTH = 3  # of a manifest below the root: model, version, file

Files = dict[PurePosixPath, str]  # by their path below the root: what the store calls them


def is_remote(repository: str) -> bool:
    return repository.partition("://")[0] in SCHEMES and "://" in repository


def cache_folder(url: str, parent: Path | None = None) -> Path:
    """Where the copy of a repository lies, unless it is told."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "beamline" if parent is None else parent
    return base / hashlib.sha256(url.encode()).hexdigest()[:16]


class RemoteRepository:
    def __init__(self, url: str, folder: Path) -> None:
        """`folder` is the copy's, and nobody else's."""
        self._url = url.rstrip("/")
        self._store, self._root = _open(self._url)
        self.folder = folder
        self._reported: Mapping[str, str] = {}

    def sync(self) -> None:
        """Brings the copy to what the store has. What can't be copied is logged, once, and left as it was. Raises
        `ModelError` where there is nothing to serve, neither in the store nor in the copy."""
        problems: dict[str, str] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sync(problems)
        except ModelError as error:
            problems[""] = str(error)
        except Exception as error:  # whatever a store's library raises: it is away, or refuses us
            problems[""] = f"{self._url} can't be read: {error or type(error).__name__}"
        for place, reason in problems.items():
            if self._reported.get(place) != reason:
                log.error("%s: %s", f"{self._url}/{place}".rstrip("/"), reason)
        self._reported = problems
        if problems and not any(self.folder.rglob(MANIFEST_FILE)):
            raise ModelError("; ".join(problems.values()))

    def _sync(self, problems: dict[str, str]) -> None:
        self._forget_cache()
        files = self._list()
        versions = {path.parent for path in files if path.name == MANIFEST_FILE and len(path.parts) <= _DEPTH}
        if not versions:
            raise ModelError(f"{self._url} has no model: there is no {MANIFEST_FILE} in it, nor in a folder below")
        kept = set[PurePosixPath]()  # in the copy
        for version in sorted(versions):
            try:
                kept.add(self._copy_version(version, files))
            except Exception as error:
                problems[str(version)] = str(error) or type(error).__name__
                kept.add(version)
        for path in (path for path in files if path.name == SETTINGS_FILE and len(path.parts) < _DEPTH):
            try:
                self._copy_settings(path, files[path])
            except Exception as error:
                problems[str(path)] = str(error) or type(error).__name__
        if problems.keys().isdisjoint({"."}):  # of the only version, the one before is kept
            self._remove_others(kept, files)

    def _list(self) -> Files:
        """All files. A web server that lists nothing can still have one version, whose files its manifest names."""
        manifest = f"{self._root}/{MANIFEST_FILE}"
        lone = {PurePosixPath(MANIFEST_FILE): manifest} if self._store.exists(manifest) else {}
        try:
            names = list(self._names(self._root, _DEPTH + 1))
        except FileNotFoundError:
            names = []
        except Exception:
            if not lone:
                raise
            names = []
        paths = {PurePosixPath(name.removeprefix(self._root).lstrip("/")): name for name in names}
        return lone | {path: name for path, name in paths.items() if not any(p.startswith(".") for p in path.parts)}

    def _names(self, folder: str, depth: int) -> Iterator[str]:
        """Raises what the store does, wherever it happens: what could not be listed must not be taken for deleted."""
        for entry in self._store.ls(folder, detail=True):
            name = str(entry["name"])
            if name.rstrip("/") == folder.rstrip("/"):  # some stores have an object for a folder itself
                continue
            if entry["type"] != "directory":
                yield name
            elif depth > 1:
                yield from self._names(name, depth - 1)

    def _copy_version(self, version: PurePosixPath, files: Files) -> PurePosixPath:
        """Its place in the copy: its own, or, where the repository is one version, its number."""
        content = self._store.cat_file(files[version / MANIFEST_FILE])
        with _staging(self.folder) as staging:
            (staging / MANIFEST_FILE).write_bytes(content)
            try:
                manifest = read_any_manifest(staging)
            except ModelError as error:
                raise ModelError(str(error).replace(f"{staging}/", "")) from None
            place = version if version.parts else PurePosixPath(str(manifest.version))
            target = self.folder / place
            with suppress(FileNotFoundError):
                if (target / MANIFEST_FILE).read_bytes() == content:
                    return place
            below = {path.relative_to(version): name for path, name in files.items() if path.is_relative_to(version)}
            wanted = {PurePosixPath(file.file): f"{self._name(version)}/{file.file}" for file in manifest.files}
            for path, name in {**wanted, **below}.items():
                if ".." in path.parts or path.is_absolute():
                    raise ModelError(f"the file name {str(path)!r} leads out of the version's folder")
                if path.name != MANIFEST_FILE:
                    (staging / path).parent.mkdir(parents=True, exist_ok=True)
                    self._download(name, staging / path)
            try:
                verify(staging, manifest)
            except ModelError as error:
                raise ModelError(str(error).replace(f"{staging}/", "")) from None
            _put(staging, target, self.folder)
        log.info("%s: copied to %s", self._name(version), target)
        return place

    def _name(self, version: PurePosixPath) -> str:
        return f"{self._root}/{version}" if version.parts else self._root

    def _download(self, name: str, target: Path) -> None:
        try:
            self._store.get_file(name, str(target))
        except FileNotFoundError:
            raise ModelError(f"{name} does not exist, or has vanished") from None

    def _copy_settings(self, path: PurePosixPath, name: str) -> None:
        content, target = self._store.cat_file(name), self.folder / path
        if target.is_file() and target.read_bytes() == content:
            return
        with _staging(self.folder) as staging:
            (staging / SETTINGS_FILE).write_bytes(content)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / SETTINGS_FILE, target)

    def _remove_others(self, versions: set[PurePosixPath], files: Files) -> None:
        """What the store does not have any more. It has listed something, so it is not just away."""
        for manifest in list(self.folder.rglob(MANIFEST_FILE)):
            version = PurePosixPath(manifest.parent.relative_to(self.folder))
            if version not in versions and not any(part.startswith(".") for part in version.parts):
                with _staging(self.folder) as staging:
                    os.rename(manifest.parent, staging / "old")
                with suppress(OSError):  # another version of the model is there, or its settings
                    if version.parent.parts:
                        (self.folder / version.parent).rmdir()
        for settings in list(self.folder.rglob(SETTINGS_FILE)):
            if PurePosixPath(settings.relative_to(self.folder)) not in files:
                settings.unlink()

    def _forget_cache(self) -> None:
        self._store.invalidate_cache()  # of what it has listed before


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A hidden folder on the same file system, which no repository's reader looks into."""
    made = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(version: Path, target: Path, folder: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _staging(folder) as before:
        old = before / "old"
        with suppress(FileNotFoundError):
            os.rename(target, old)
        try:
            os.rename(version, target)
        except OSError:
            with suppress(FileNotFoundError):
                os.rename(old, target)
            raise


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        find: Callable[..., Any] = fsspec.core.url_to_fs
        store, root = find(url)
    except ImportError as error:
        raise ModelError(f"{url} can't be read here ({error}): pip install '.[{_EXTRAS[scheme]}]'") from error
    return store, str(root).rstrip("/")
