"""Looks at the repository's folder from time to time, and has changed models reloaded.

By looking, not by being told: it works on every file system, network ones too. A change counts when the folder has been
still for one interval, so that a copy that is under way is not taken for a broken model. What could not be loaded for a
reason that may pass is tried again without another change, after one look, after two more, after four, and so on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from beamline.serving.errors import ModelError
from beamline.serving.models.repository import model_folders

log = logging.getLogger(__name__)

_DEPTH = 3  # of files below a model's folder: its settings, its versions' files, their engines

_MOST_SECONDS = 300.0  # between two attempts at the same

Signature = tuple[tuple[str, int, int, int, int], ...]


@dataclass(slots=True)
class _Again:
    """A change that could not be followed yet."""

    signature: Signature | None  # None: the folder is gone
    pause: int  # in looks
    left: int


class Watcher:
    def __init__(
        self,
        root: Path,
        refresh: Callable[[list[str]], Awaitable[Collection[str]]],
        name: str | None = None,
        sync: Callable[[], None] | None = None,
    ) -> None:
        """`refresh` answers which names to try again. `name`: of the only model. `sync`: brings the folder up to date
        before each look, where it is a copy."""
        self._sync = sync
        self._root, self._name = root, name
        self._refresh = refresh
        self._known = signatures(root, name)  # what the loaded models were made from
        self._last = dict(self._known)
        self._again: dict[str, _Again] = {}
        self._longest = 128  # looks between two attempts

    async def run(self, seconds: float) -> None:
        self._longest = max(1, round(_MOST_SECONDS / seconds))
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look()
            except Exception:  # whatever it was: who stops looking misses every later change
                log.exception("a look at the repository failed")

    async def look(self) -> None:
        try:
            if self._sync is not None:
                await asyncio.to_thread(self._sync)
            now = await asyncio.to_thread(signatures, self._root, self._name)
        except (OSError, ModelError) as error:  # a file system that is away for a moment: nothing is unloaded for it
            log.error("the repository can't be watched: %s", error)
            return
        names = {*now, *self._known, *self._again}
        still = {name for name in names if now.get(name) == self._last.get(name)}
        changed = [name for name in still if self._is_due(name, now.get(name))]
        self._last = now
        for name in changed:
            if name in now:
                self._known[name] = now[name]
            else:
                self._known.pop(name, None)
        if not changed:
            return
        failed: Collection[str] = changed  # unless it says otherwise
        try:
            failed = await self._refresh(changed)
        finally:
            for name in changed:
                if name in failed:
                    self._again[name] = self._later(name, now.get(name))
                else:
                    self._again.pop(name, None)

    def _is_due(self, name: str, signature: Signature | None) -> bool:
        """At a look that sees the folder still. Where it was tried and has not changed since, the pause runs down."""
        again = self._again.get(name)
        if again is None:
            return signature != self._known.get(name)
        again.left -= 1
        return again.left <= 0 or signature != again.signature

    def _later(self, name: str, signature: Signature | None) -> _Again:
        before = self._again.get(name)
        pause = 1
        if before is not None and before.signature == signature:
            pause = min(2 * before.pause, self._longest)
        return _Again(signature, pause, pause)


def signatures(root: Path, name: str | None = None) -> dict[str, Signature]:
    """For every model of the repository, what tells one state of its folder from another without reading files."""
    return {model: tuple(sorted(_files(folder, _DEPTH))) for model, folder in model_folders(root, name).items()}


def _files(folder: Path, depth: int) -> Iterator[tuple[str, int, int, int, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone while we look; the next look will see
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            if entry.is_dir():
                if depth > 1:
                    yield from _files(Path(entry.path), depth - 1)
            else:
                status = entry.stat()
                # `cp -p` sets the time of the last change of content to another file's; that of the status it can't.
                yield entry.path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        except OSError:
            continue
