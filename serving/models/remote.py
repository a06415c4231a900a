"""A repository in an object store (s3://, gs://), on a web server (https://) or in an image of a container registry
(oci://), kept as a copy in a local folder.

A version is copied elsewhere, checked against its manifest's hashes, and renamed into its place: the copy only ever has
whole versions, and what is wrong in the store leaves it as it was. Everything else, `--watch` too, works on the copy.
A version is known by its manifest, which has the hashes of all its files: as long as that is the same, nothing is read
again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from beamline.serving.contract.manifest import MANIFEST_FILE, read_any_manifest
from beamline.serving.errors import ModelError
from beamline.serving.models.oci_image import ImageStore
from beamline.serving.models.oci_registry import OCI_SCHEMES, Reference
from beamline.serving.models.repository import verify
from beamline.serving.models.settings import SETTINGS_FILE
from beamline.serving.models.stores import DEPTH, ObjectStore, Store, is_hidden, staging_folder

log = logging.getLogger(__name__)

SCHEMES = ("s3", "gs", "https", "http", *OCI_SCHEMES)


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
        self.folder = folder
        self._store = _store_of(self._url, folder)
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
        if problems and not self._copied(MANIFEST_FILE):
            raise ModelError("; ".join(problems.values()))

    def _sync(self, problems: dict[str, str]) -> None:
        self._store.refresh()
        files = self._store.files()
        versions = {path.parent for path in files if path.name == MANIFEST_FILE and len(path.parts) <= DEPTH}
        if not versions:
            raise ModelError(f"{self._url} has no model: there is no {MANIFEST_FILE} in it, nor in a folder below")
        kept = set[PurePosixPath]()  # in the copy
        for version in sorted(versions):
            try:
                kept.add(self._copy_version(version, files))
            except Exception as error:
                problems[str(version)] = str(error) or type(error).__name__
                kept.add(version)
        for path in (path for path in files if path.name == SETTINGS_FILE and len(path.parts) < DEPTH):
            try:
                self._copy_settings(path)
            except Exception as error:
                problems[str(path)] = str(error) or type(error).__name__
        if problems.keys().isdisjoint({"."}):  # of the only version, the one before is kept
            self._remove_others(kept, files)

    def _copy_version(self, version: PurePosixPath, files: set[PurePosixPath]) -> PurePosixPath:
        """Its place in the copy: its own, or, where the repository is one version, its number."""
        content = self._store.read(version / MANIFEST_FILE)
        with staging_folder(self.folder) as staging:
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
            below = {path.relative_to(version) for path in files if path.is_relative_to(version)}
            for path in below | {PurePosixPath(file.file) for file in manifest.files}:
                if ".." in path.parts or path.is_absolute():
                    raise ModelError(f"the file name {str(path)!r} leads out of the version's folder")
                if path.name != MANIFEST_FILE:
                    (staging / path).parent.mkdir(parents=True, exist_ok=True)
                    self._fetch(version / path, staging / path)
            try:
                verify(staging, manifest)
            except ModelError as error:
                raise ModelError(str(error).replace(f"{staging}/", "")) from None
            _put(staging, target, self.folder)
        log.info("%s: copied to %s", f"{self._url} {version}" if version.parts else self._url, target)
        return place

    def _fetch(self, path: PurePosixPath, target: Path) -> None:
        try:
            self._store.copy(path, target)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist, or has vanished") from None

    def _copy_settings(self, path: PurePosixPath) -> None:
        content, target = self._store.read(path), self.folder / path
        if target.is_file() and target.read_bytes() == content:
            return
        with staging_folder(self.folder) as staging:
            (staging / SETTINGS_FILE).write_bytes(content)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / SETTINGS_FILE, target)

    def _remove_others(self, versions: set[PurePosixPath], files: set[PurePosixPath]) -> None:
        """What the store does not have any more. It has listed something, so it is not just away."""
        for version in {manifest.parent for manifest in self._copied(MANIFEST_FILE)} - versions:
            with staging_folder(self.folder) as staging:
                os.rename(self.folder / version, staging / "old")
            with suppress(OSError):  # another version of the model is there, or its settings
                if version.parent.parts:
                    (self.folder / version.parent).rmdir()
        for settings in self._copied(SETTINGS_FILE) - files:
            (self.folder / settings).unlink()

    def _copied(self, name: str) -> set[PurePosixPath]:
        """The files of this name that the copy has."""
        found = {PurePosixPath(path.relative_to(self.folder)) for path in self.folder.rglob(name)}
        return {path for path in found if not is_hidden(path)}


def _store_of(url: str, folder: Path) -> Store:
    if url.partition("://")[0] in OCI_SCHEMES:
        return ImageStore(Reference.parse(url), folder / ".layers")
    return ObjectStore(url)


def _put(version: Path, target: Path, folder: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder) as before:
        old = before / "old"
        with suppress(FileNotFoundError):
            os.rename(target, old)
        try:
            os.rename(version, target)
        except OSError:
            with suppress(FileNotFoundError):
                os.rename(old, target)
            raise
