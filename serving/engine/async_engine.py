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
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.call import current_call
from beamline.serving.engine.request import DecodingOptions, Piece, Request, Result
from beamline.serving.engine.scoring import ScoringRequest
from beamline.serving.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to decode."""

    source: tuple[int, ...]
    options: DecodingOptions
    features: NDArray[np.float32] | None = None  # instead of a source

    @property
    def length(self) -> int:
        return len(self.source if self.features is None else self.features)


class Decoder(Protocol):
    """What the doors use of an engine. All methods may be called from any thread and never block."""

    def submit(self, request: Request) -> None:
        """Raises `Overloaded` or `ShuttingDown`."""
        ...

    def cancel(self, request_id: int) -> None: ...

    def enough(self, request_id: int, index: int) -> None:
        """No more of one hypothesis is wanted."""
        ...


class Scorer(Protocol):
    def score(self, request: ScoringRequest) -> None: ...

    def cancel(self, request_id: int) -> None: ...


class ModelEngine(Decoder, Scorer, Protocol):
    """All that a model's doors use of its engine."""


Pair = tuple[tuple[int, ...], tuple[int, ...]]  # a target, and what should follow each of its tokens
News = TypeVar("News")
Answer = TypeVar("Answer")


async def decode_all(engine: Decoder, jobs: Sequence[Job], deadline: float | None, max_in_flight: int) -> list[Result]:
    """The results in the order of the jobs. No more than `max_in_flight` of them are with the engine at once,
    so that a long text neither fails for its length nor takes the whole queue."""
    return await DecodingCall(engine, deadline).run(jobs, max_in_flight)


Tell = Callable[[int, Piece | Result], None]  # of which job


class DecodingCall:
    """The sequences of one call. Lives on the event loop; only `deliver` runs on the engine's thread. `tell` is given
    every job's news as they come, and its result."""

    def __init__(self, engine: Decoder, deadline: float | None, tell: Tell | None = None) -> None:
        self._engine = engine
        self._deadline = deadline
        self._tell = tell
        self._started = time.monotonic()
        self._call = current_call()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._pending: dict[int, int] = {}  # a job's index -> the id of its request
        self._outcomes: dict[int, Result] = {}
        self._ended: list[tuple[float, float, float, float]] = []
        self._failure: Exception | None = None

    async def run(self, jobs: Sequence[Job], max_in_flight: int) -> list[Result]:
        try:
            for index in self._order(jobs):
                while self.in_flight >= max_in_flight:
                    await self.progress()
                while not self.submit(index, jobs[index]):
                    await self.progress()
            while self.in_flight:
                await self.progress()
        except BaseException:  # cancellation as well: nobody waits for the others any more
            self.abandon()
            raise
        return self.results()

    def _order(self, jobs: Sequence[Job]) -> list[int]:
        """Longest first, so that no long one is left to run alone at the end; but whoever reads along begins at the
        beginning."""
        numbers = list(range(len(jobs)))
        return numbers if self._tell is not None else sorted(numbers, key=lambda number: -jobs[number].length)

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def submit(self, index: int, job: Job) -> bool:
        """False where the queue is full and a request of our own will make room. A call of which nothing runs
        is refused instead: waiting would be a second, hidden queue."""
        settle = partial(deliver, self._loop, partial(self._settle, index))
        progress = None if self._tell is None else partial(deliver, self._loop, partial(self._tell, index))
        request = Request(
            job.source,
            self._remaining(job.options),
            settle,
            self._deadline,
            progress=progress,
            priority=self._call.priority,
            queue_deadline=self._queue_deadline(),
            features=job.features,
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
            if self._tell is not None:
                self._tell(index, outcome)
        self._changed.set()

    def enough(self, index: int, hypothesis: int) -> None:
        """Enough is known of one hypothesis of a job."""
        if index in self._pending:
            self._engine.enough(self._pending[index], hypothesis)

    def abandon(self) -> None:
        for request_id in self._pending.values():
            self._engine.cancel(request_id)

    def results(self) -> list[Result]:
        self._call.report(self._ended)
        return [self._outcomes[index] for index in sorted(self._outcomes)]


async def score_all(
    engine: Scorer,
    sources: Sequence[tuple[int, ...]] | None,
    pairs: Sequence[Pair],
    deadline: float | None,
    max_in_flight: int,
) -> list[tuple[float, ...]]:
    """The log-probabilities of each pair's labels, in order."""
    call = current_call()

    def submit(number: int, resolve: Resolve[tuple[float, ...]]) -> int:
        target, labels = pairs[number]
        source = None if sources is None else sources[number]
        queue_deadline = None if call.queue_timeout is None else time.monotonic() + call.queue_timeout
        request = ScoringRequest(source, target, labels, resolve, deadline, call.priority, queue_deadline)
        engine.score(request)
        return request.id

    return await answer_all(len(pairs), submit, engine.cancel, max_in_flight)


Resolve = Callable[[Answer | Exception], None]


async def answer_all(
    count: int, submit: Callable[[int, Resolve[Answer]], int], cancel: Callable[[int], None], max_in_flight: int
) -> list[Answer]:
    """The answers to requests that each have one, in order, no more than `max_in_flight` with the engine at once.
    `submit` sends one and returns its id. If one fails, or the caller goes away, the rest are cancelled."""
    loop = asyncio.get_running_loop()
    pending: dict[int, tuple[int, asyncio.Future[Answer]]] = {}
    found: dict[int, Answer] = {}

    def submitted(number: int) -> bool:
        answer: asyncio.Future[Answer] = loop.create_future()
        try:
            request_id = submit(number, partial(deliver, loop, partial(_settle, answer)))
        except Overloaded:
            if not pending:  # waiting would be a second, hidden queue
                raise
            return False
        pending[number] = (request_id, answer)
        return True

    async def progress() -> None:
        await asyncio.wait([answer for _, answer in pending.values()], return_when=asyncio.FIRST_COMPLETED)
        for number in [number for number, (_, answer) in pending.items() if answer.done()]:
            found[number] = pending.pop(number)[1].result()

    try:
        for number in range(count):
            while len(pending) >= max_in_flight or not submitted(number):
                await progress()
        while pending:
            await progress()
    except BaseException:
        for request_id, answer in pending.values():
            cancel(request_id)
            answer.cancel()
        raise
    return [found[number] for number in range(count)]


def _settle(answer: asyncio.Future[Answer], outcome: Answer | Exception) -> None:
    if answer.done():  # cancelled
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def deliver(loop: asyncio.AbstractEventLoop, settle: Callable[[News], None], outcome: News) -> None:
    """On the engine's thread, which must not care that a server was torn down and its loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle, outcome)
