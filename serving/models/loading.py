"""The thread that models are loaded in: one job at a time, each with a time limit.

One thread, so that the C library, which has a heap for each, keeps the leftovers of loading in one place. A job that
takes too long (a file system that is away, a driver that hangs) can't be ended; so it is given up: what it makes is
dropped, whenever that may be, and the next job has a new thread. None of them keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from beamline.serving.errors import ModelError

Result = TypeVar("Result")
_Jobs = SimpleQueue[Callable[[], None] | None]


class LoadTooLong(ModelError):
    pass


class LoadingThread:
    """Belongs to the event loop."""

    def __init__(self, limit: float | None) -> None:
        """`limit` in seconds, for each job."""
        self._limit = limit
        self._jobs = _started()

    async def run(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Raises `LoadTooLong` where it takes longer than the limit."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def answer(held: list[Future[Result]]) -> None:
            if result.done():  # it was given up
                self.drop(held)
                return
            outcome = held[0]
            if (error := outcome.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(outcome.result())

        def job() -> None:
            held: list[Future[Result]] = [Future()]
            try:
                held[0].set_result(work(*arguments))
            except BaseException as error:
                held[0].set_exception(error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(answer, held)
            del held  # an error has this frame in its traceback

        self._jobs.put(job)
        try:
            async with asyncio.timeout(self._limit):
                return await result
        except TimeoutError:
            if not result.cancelled():  # it is the work's own
                raise
            self._begin_anew()
            raise LoadTooLong(f"it took longer than {self._limit:g} seconds, and was given up") from None

    def _begin_anew(self) -> None:
        """On another thread, with what waits behind the job that hangs."""
        hung, self._jobs = self._jobs, _started()
        with suppress(Empty):
            while True:
                self._jobs.put(hung.get_nowait())
        hung.put(None)

    def drop(self, last: list[Any]) -> None:
        """Clears a list of what nobody else refers to any more, when there is nothing else to do, and gives the memory
        back: to end a model may wait for a GPU, and nobody's call should wait with it."""

        def job() -> None:
            last.clear()
            give_memory_back()

        self._jobs.put(job)

    def stop(self) -> None:
        """When the job that runs now is over."""
        self._jobs.put(None)


def _started() -> _Jobs:
    jobs: _Jobs = SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), name="loading", daemon=True).start()
    return jobs


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold a model that nobody wants any more


def give_memory_back() -> None:
    """A model goes with its last reference; should two of its parts refer to each other, it goes now. And the C library
    keeps freed memory for itself; where it is another one, there is nothing to do."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # it may have been there when the process was ready
    gc.collect()
    if frozen:
        gc.freeze()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
