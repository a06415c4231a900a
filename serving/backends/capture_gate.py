"""What must not happen while a CUDA graph is recorded: on the same GPU, whichever model it is for, that a session is
opened or a plan loaded; and on the recording thread, that the collector of garbage closes one.

ONNX Runtime's provider waits for the whole device when it is made, and TensorRT may. CUDA forbids that while any stream
of the device is recorded: both fail. Recordings take milliseconds, so a model that is being loaded waits for them.
Loading takes seconds, for which no step waits: it is recorded later. A session that is closed frees its memory at once,
which CUDA forbids to a thread that records.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock


class Gate:
    """Several recordings go through side by side, or several openings."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._recordings = self._openings = 0
        self.waiting = 0  # openings that recordings keep from it

    @contextmanager
    def opening(self) -> Iterator[None]:
        """When nothing is recorded."""
        with self._changed:
            self.waiting += 1
            self._changed.wait_for(lambda: not self._recordings)
            self.waiting -= 1
            self._openings += 1
        try:
            yield
        finally:
            with self._changed:
                self._openings -= 1

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """Whether it may be done now."""
        with self._changed:
            free = not self._openings
            self._recordings += free
        try:
            yield free
        finally:
            with self._changed:
                self._recordings -= free
                self._changed.notify_all()


_GATES: dict[int, Gate] = {}


def gate_of(device: int) -> Gate:
    return _GATES.setdefault(device, Gate())


class _Collector:
    """Of Python's garbage, which it leaves alone while anybody needs that."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pauses = 0
        self._was_enabled = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            if not self._pauses:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses and self._was_enabled:
                    gc.enable()


COLLECTOR = _Collector()
