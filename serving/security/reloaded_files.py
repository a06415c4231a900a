"""Values from files that an operator may replace while the server runs: certificates, tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from beamline.serving.errors import BeamlineError

log = logging.getLogger(__name__)

T = TypeVar("T")
_Fingerprint = tuple[tuple[int, int, int] | None, ...]


class ReloadedFiles(Generic[T]):
    """The newest value that could be loaded from the files. Files that are broken at the start are an error. Files that
    break later are logged once, and the last value stays in use: an operator's mistake must not stop the server, and
    while a certificate and its key are replaced, there is a moment in which they don't match. Thread-safe."""

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()  # grpc calls from threads of its own
        self._seen = self._fingerprint()
        self._value = load()

    def get(self) -> T:
        """Reads the files only if their status has changed. That check takes microseconds: every call makes it."""
        return self.get_changed()[0]

    def get_changed(self) -> tuple[T, bool]:
        """The value, and whether it has been loaded again just now."""
        with self._lock:
            seen = self._fingerprint()
            if seen == self._seen:
                return self._value, False
            self._seen = seen
            try:
                self._value = self._load()
            except BeamlineError as error:
                log.error("the old one stays in use: %s", error)
                return self._value, False
            log.info("read anew: %s", ", ".join(map(str, self._paths)))
            return self._value, True

    def _fingerprint(self) -> _Fingerprint:
        return tuple(_status(path) for path in self._paths)


def _status(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
