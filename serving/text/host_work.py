"""The host's work for a call: texts to tokens and back. Where it runs, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from beamline.serving.errors import Overloaded


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
_LARGE = 64 * 1024  # from here on a request waits behind others like it, and not before smaller ones
_FEW = 300  # parts of a message that are gone through in less than a millisecond
_RETRY_SECONDS = 1.0


class TextWorkers:
    """Threads for texts that are too large for the event loop, one for the large and one for the rest: more would only
    take cores from the engine. And how much of large requests may be here at once. Belongs to the event loop."""

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._for_large = ThreadPoolExecutor(1, thread_name_prefix="large-text")

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Around all that a call does, from before its text is read. Small ones are never refused here."""
        if size <= _SMALL:
            yield
            return
        self.reserve(size)
        try:
            yield
        finally:
            self.release(size)

    def reserve(self, size: int) -> None:
        """Raises `Overloaded` where there would be too much. What comes alone is taken, however large."""
        self._check(size)
        self._bytes += size

    def check(self, size: int) -> None:
        """Raises what `admitted` would."""
        if size > _SMALL:
            self._check(size)

    def _check(self, size: int) -> None:
        if self._bytes and self._bytes + size > self._max_bytes:
            raise Overloaded(
                f"requests of {self._bytes} bytes are being worked on, and {self._max_bytes} are allowed at once "
                "(--max-pending-mib): try again, or send smaller ones",
                _RETRY_SECONDS,
            )

    def release(self, size: int) -> None:
        self._bytes -= size

    async def run(self, size: int, work: Callable[[], Answer]) -> Answer:
        """Small work on the event loop, large work beside it. `size`: bytes, read or written."""
        if size <= _SMALL:
            return work()
        threads = self._for_large if size > _LARGE else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def shutdown(self, wait: bool = False) -> None:
        for threads in (self._threads, self._for_large):
            threads.shutdown(wait=wait, cancel_futures=True)


def is_large(message: Message) -> bool:
    """Whether it is too much for the event loop to write. Its size in bytes would take as long as writing it does."""
    return _remaining(message, _FEW) < 0


def _remaining(message: Message, few: int) -> int:
    for field, value in message.ListFields():
        if isinstance(value, Message):
            few = _remaining(value, few)
        elif isinstance(value, str | bytes):
            few -= 1 + len(value) // 64
        elif field.message_type is not None:
            few -= len(value)
            for each in (value.values() if isinstance(value, Mapping) else value) if few >= 0 else ():
                few = _remaining(each, few) if isinstance(each, Message) else few - 1
                if few < 0:
                    break
        else:
            few -= len(value) if hasattr(value, "__len__") else 1
        if few < 0:
            break
    return few
