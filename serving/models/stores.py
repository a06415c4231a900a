"""What a repository elsewhere is read through: files by their path below its root, whatever the store calls them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from beamline.serving.contract.manifest import MANIFEST_FILE
from beamline.serving.errors import ModelError

DEPTH = 3  # of a manifest below the root: model, version, file
FILE_DEPTH = DEPTH + 1  # a version's engines have a folder of their own

_EXTRAS = {"s3": "remote", "https": "remote", "http": "remote", "gs": "gs"}


class Store(Protocol):
    """Raises whatever it likes where something is away, and `FileNotFoundError` where a file is."""

    def refresh(self) -> None:
        """What is read from now on is what the store has now, or later."""

    def files(self) -> set[PurePosixPath]:
        """All that may belong to a repository; hidden files don't."""

    def read(self, path: PurePosixPath) -> bytes: ...

    def copy(self, path: PurePosixPath, target: Path) -> None: ...


def is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder on the same file system, which no repository's reader looks into."""
    made = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class ObjectStore:
    """S3, Google's storage or a web server, through fsspec."""

    def __init__(self, url: str) -> None:
        self._files, root = _open(url)
        self._root = root.rstrip("/")
        self._names: dict[PurePosixPath, str] = {}

    def refresh(self) -> None:
        self._files.invalidate_cache()  # of what it has listed before

    def files(self) -> set[PurePosixPath]:
        """A web server that lists nothing can still have one version, whose files its manifest names."""
        manifest = f"{self._root}/{MANIFEST_FILE}"
        lone = {PurePosixPath(MANIFEST_FILE): manifest} if self._files.exists(manifest) else {}
        try:
            names = list(self._listed(self._root, FILE_DEPTH))
        except FileNotFoundError:
            names = []
        except Exception:
            if not lone:
                raise
            names = []
        self._names = lone | {PurePosixPath(name.removeprefix(self._root).lstrip("/")): name for name in names}
        return {path for path in self._names if not is_hidden(path)}

    def read(self, path: PurePosixPath) -> bytes:
        return bytes(self._files.cat_file(self._name(path)))

    def copy(self, path: PurePosixPath, target: Path) -> None:
        self._files.get_file(self._name(path), str(target))

    def _name(self, path: PurePosixPath) -> str:
        return self._names.get(path, f"{self._root}/{path}")

    def _listed(self, folder: str, depth: int) -> Iterator[str]:
        """Raises what the store does, wherever it happens: what could not be listed must not be taken for deleted."""
        for entry in self._files.ls(folder, detail=True):
            name = str(entry["name"])
            if name.rstrip("/") == folder.rstrip("/"):  # some stores have an object for a folder itself
                continue
            if entry["type"] != "directory":
                yield name
            elif depth > 1:
                yield from self._listed(name, depth - 1)


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        find: Callable[..., Any] = fsspec.core.url_to_fs
        files, root = find(url)
    except ImportError as error:
        raise ModelError(f"{url} can't be read here ({error}): pip install '.[{_EXTRAS[scheme]}]'") from error
    return files, str(root)
