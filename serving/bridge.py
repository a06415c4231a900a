"""From the event loop to an engine's thread and back.

A call's sequences are decoded side by side. If one fails, or the caller goes away, the rest are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from serving.calls import current_call
from serving.engine.request import DecodingOptions, Request, Result
from serving.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to decode."""

    source: tuple[int, ...]
    options: DecodingOptions


class Decoder(Protocol):
    """What the doors use of an engine. Both methods may be called from any thread and never block."""

    def submit(self, request: Request) -> None:
        """Raises `Overloaded` or `ShuttingDown`."""
        ...

    def cancel(self, request_id: int) -> None: ...


async def decode_all(engine: Decoder, jobs: Sequence[Job], deadline: float | None, max_in_flight: int) -> list[Result]:
    """The results in the order of the jobs. No more than `max_in_flight` of them are with the engine at once,
    so that a long text neither fails for its length nor takes the whole queue."""
    call = _Call(engine, deadline)
    try:
        for index, job in enumerate(jobs):
            while call.in_flight >= max_in_flight:
                await call.progress()
            while not call.submit(index, job):
                await call.progress()
        while call.in_flight:
            await call.progress()
    except BaseException:  # cancellation as well: nobody waits for the others any more
        call.abandon()
        raise
    return call.results()


class _Call:
    """The sequences of one call. Lives on the event loop; only `_deliver` runs on the engine's thread."""

    def __init__(self, engine: Decoder, deadline: float | None) -> None:
        self._engine = engine
        self._deadline = deadline
        self._started = time.monotonic()
        self._call = current_call()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._pending: dict[int, int] = {}  # a job's index -> the id of its request
        self._outcomes: dict[int, Result] = {}
        self._ended: list[tuple[float, float, float, float]] = []
        self._failure: Exception | None = None

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def submit(self, index: int, job: Job) -> bool:
        """False where the queue is full and a request of our own will make room. A call of which nothing runs
        is refused instead: waiting would be a second, hidden queue."""
        settle = partial(_deliver, self._loop, partial(self._settle, index))
        request = Request(
            job.source,
            self._remaining(job.options),
            settle,
            self._deadline,
            priority=self._call.priority,
            queue_deadline=self._queue_deadline(),
        )
        try:
            self._engine.submit(request)
        except Overloaded:
            if not self._pending:
                raise
            return False
        # Not too late: an answer is delivered by the loop, which is ours until the next `await`.
        self._pending[index] = request.id
        return True

    def _remaining(self, options: DecodingOptions) -> DecodingOptions:
        """The time limit is the call's, and a part of a long text may be submitted late."""
        if options.time_limit is None:
            return options
        return replace(options, time_limit=max(0.0, options.time_limit - (time.monotonic() - self._started)))

    def _queue_deadline(self) -> float | None:
        """From when it is submitted: a long call's later sequences wait behind its own first ones."""
        timeout = self._call.queue_timeout
        return None if timeout is None else time.monotonic() + timeout

    async def progress(self) -> None:
        """Waits until something was answered; raises the first failure."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _settle(self, index: int, outcome: Result | Exception) -> None:
        del self._pending[index]
        if isinstance(outcome, Exception):
            self._failure = self._failure or outcome
        else:
            self._outcomes[index] = outcome
            timings = outcome.timings
            self._ended.append((time.monotonic(), timings.queue, timings.encode, timings.decode))
        self._changed.set()

    def abandon(self) -> None:
        for request_id in self._pending.values():
            self._engine.cancel(request_id)

    def results(self) -> list[Result]:
        self._call.report(self._ended)
        return [self._outcomes[index] for index in sorted(self._outcomes)]


def _deliver(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[Result | Exception], None],
    outcome: Result | Exception,
) -> None:
    """On the engine's thread, which must not care that a server was torn down and its loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle, outcome)
