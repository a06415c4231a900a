"""The host's work for a call: texts to tokens and back. Where it runs, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar


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


Answer = TypeVar("Answer")

# Bytes of a request that are tokenised in about a millisecond; more would keep the event loop from others.
_SMALL = 2 * 1024


async def run_where_it_fits(workers: Executor, size: int, work: Callable[[], Answer]) -> Answer:
    """A small request on the event loop, a large one beside it. `size` is the request's, in bytes."""
    if size > _SMALL:
        return await asyncio.get_running_loop().run_in_executor(workers, work)
    return work()
