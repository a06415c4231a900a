"""How long the host works for a call: before the engine has it (texts to tokens), and behind it (tokens to text)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HostTime:
    """Of one call, in seconds."""

    def __init__(self) -> None:
        self.reading = 0.0
        self.writing = 0.0

    @contextmanager
    def reads(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.reading += time.monotonic() - began

    @contextmanager
    def writes(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.writing += time.monotonic() - began


ObserveHostTime = Callable[[HostTime, int], None]  # of every call that was answered, and its number of sequences


def ignore(time: HostTime, sequences: int) -> None:
    pass
