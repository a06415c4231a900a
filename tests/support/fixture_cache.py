"""What fixtures export, kept on disk between runs and shared by the workers of one run.

An entry is found by the hash of everything that made it: the maker and its parameters, the source of every module of
ours that it can execute, the version of every installed package, and the Python. It is written elsewhere and renamed,
under a lock, so that it is complete or missing, and of two workers that want it one waits for the other. A test gets a
copy: what it does to that copy stays with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.support.import_graph import source_closure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "fixtures"  # `make clean` removes it
KEPT = 4  # entries of one name: as many branches one can go back and forth between
UNUSED_SECONDS = 21 * 24 * 3600
_SUMS = "sums.json"


@dataclass(frozen=True)
class FixtureCache:
    folder: Path
    project: Path
    packages: tuple[str, ...]
    read: dict[tuple[str, ...], dict[str, str]] | None = None  # hashes of the sources, where they don't change any more

    def fill(
        self,
        into: Path,
        make: Callable[..., object],
        *,
        runs: Sequence[str] = (),
        files: Sequence[Path] = (),
        **parameters: Any,
    ) -> Path:
        """`into`, an empty or missing folder, with what `make(folder, **parameters)` writes. `runs`: modules that it
        executes without importing them, as those of another process; `files`: others that it reads.
        The parameters must have a `repr` that says all about them."""
        what = json.dumps([make.__qualname__, sorted((each, repr(value)) for each, value in parameters.items())])
        name = f"{make.__module__}.{make.__name__}-{_hash(what)[:8]}"
        entry = self.folder / f"{name}-{self._key(what, [make.__module__, *runs], files)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(entry.with_name(f"{entry.name}.lock")):
            if not _complete(entry):
                self._make(entry, make, parameters)
                self._prune(name, entry)
            os.utime(entry)
            shutil.copytree(entry / "content", into, dirs_exist_ok=True)
        return into

    def answers(self, make: Callable[..., object], **parameters: Any) -> Any:
        """What `make(**parameters)` returns, by way of JSON."""

        @wraps(make)
        def write(folder: Path, **given: Any) -> None:
            (folder / "answers.json").write_text(json.dumps(make(**given)))

        with tempfile.TemporaryDirectory() as folder:
            return json.loads((self.fill(Path(folder), write, **parameters) / "answers.json").read_text())

    def _key(self, what: str, modules: Sequence[str], files: Sequence[Path]) -> str:
        ours = self._hashes(tuple(modules))
        read = {file.name: _sha256(file) for file in files}
        machine = [sys.version, platform.machine(), *self.packages]
        return _hash(json.dumps([what, ours, read, machine], sort_keys=True))[:24]

    def _hashes(self, modules: tuple[str, ...]) -> dict[str, str]:
        if self.read is not None and modules in self.read:
            return self.read[modules]
        sources = source_closure(modules, self.project)
        missing = [module for module in modules if module not in sources]
        if missing:
            raise ValueError(f"no source of {', '.join(missing)} in {self.project}: the cache could not see it change")
        hashes = {module: _sha256(path) for module, path in sources.items()}
        if self.read is not None:
            self.read[modules] = hashes
        return hashes

    def _make(self, entry: Path, make: Callable[..., object], parameters: dict[str, Any]) -> None:
        shutil.rmtree(entry, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=self.folder) as made:
            content = Path(made) / "entry" / "content"
            content.mkdir(parents=True)
            make(content, **parameters)
            (content.parent / _SUMS).write_text(json.dumps(_sums(content)))
            content.parent.rename(entry)

    def _prune(self, name: str, newest: Path) -> None:
        """Of those that other sources made, the ones used last stay. Nobody comes back to what was not used for weeks,
        whatever its name. And none goes that a worker reads right now."""
        entries = [path for path in self.folder.glob("[!.]*") if path.is_dir() and path != newest]
        same = sorted((path for path in entries if path.name.startswith(f"{name}-")), key=_used, reverse=True)
        unused = [path for path in entries if _used(path) < time.time() - UNUSED_SECONDS]
        for old in {*same[KEPT - 1 :], *unused}:
            lock = old.with_name(f"{old.name}.lock")
            with locked(lock, wait=False) as mine:
                if mine:
                    shutil.rmtree(old, ignore_errors=True)


@cache
def fixture_cache() -> FixtureCache:
    # All of them: what an exporter's output depends on is more than one would list.
    packages = tuple(sorted({f"{each.name}=={each.version}" for each in distributions()}))
    return FixtureCache(FOLDER, ROOT, packages, {})


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Among processes; the file stays, because another may be waiting at it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _complete(entry: Path) -> bool:
    """False also for what was changed since."""
    try:
        wanted = json.loads((entry / _SUMS).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(wanted == _sums(entry / "content"))


def _sums(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
