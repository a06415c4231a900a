"""From the event loop to an engine's thread and back: the requests of one call, run side by side.

If one fails, or the caller goes away, the rest are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol
from weakref import WeakSet

from beamline.serving.contract.call import current_call
from beamline.serving.engine.outputs import Answer, Output, Piece, Pooled, Result, Scores, TraceStep
from beamline.serving.engine.request import Request
from beamline.serving.errors import Overloaded


class AnyEngine(Protocol):
    """What calls use of an engine, whatever it computes. Its methods may be called from any thread, and never block."""

    def submit(self, request: Request) -> None:
        """Raises `Overloaded` or `ShuttingDown`."""

    def cancel(self, request_id: int) -> None: ...

    def stop_hypothesis(self, request_id: int, index: int) -> None:
        """No more is wanted of one hypothesis."""


OnOutput = Callable[[int, Output], None]  # of which request of the call

running: WeakSet[RequestGroup] = WeakSet()  # the groups that wait for an engine, for `fail_running`


def fail_running(error: Exception) -> None:
    """Answers every call that waits for an engine."""
    for group in list(running):
        group.fail(error)


class RequestGroup:
    """The requests of one call. Lives on the event loop; the engine's outputs are brought there, once a step.
    `on_output` is given every request's pieces as they come, and its answer."""

    def __init__(self, engine: AnyEngine, deadline: float | None, on_output: OnOutput | None = None) -> None:
        self._engine = engine
        self._deadline = deadline
        self._on_output = on_output
        self._started = time.monotonic()
        self._call = current_call()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._pending: dict[int, int] = {}  # a request's index in the call -> its id
        self._answers: dict[int, Answer] = {}
        self._timings: list[tuple[float, float, float, float]] = []
        self._failure: Exception | None = None

    async def run(self, requests: Sequence[Request], max_in_flight: int) -> list[Answer]:
        """The answers in the order of the requests. No more than `max_in_flight` of them are with the engine at once,
        so that a long text neither fails for its length nor takes the whole queue."""
        running.add(self)
        try:
            for index in self._order(requests):
                while len(self._pending) >= max_in_flight or not self._submit(index, requests[index]):
                    await self._progress()
            while self._pending:
                await self._progress()
        except BaseException:  # cancellation as well: the others' answers are not wanted any more
            self.abandon()
            raise
        finally:
            running.discard(self)
        self._call.report(self._timings)
        return [self._answers[index] for index in range(len(requests))]

    def fail(self, error: Exception) -> None:
        """For a server whose engines don't answer any more."""
        self._failure = self._failure or error
        self._changed.set()

    def stop(self, index: int, hypothesis: int) -> None:
        """No more is wanted of one hypothesis of a request."""
        if index in self._pending:
            self._engine.stop_hypothesis(self._pending[index], hypothesis)

    def abandon(self) -> None:
        for request_id in self._pending.values():
            self._engine.cancel(request_id)

    def _order(self, requests: Sequence[Request]) -> list[int]:
        """Longest first, so that no long one is left to run alone at the end; but a stream begins at the beginning."""
        numbers = list(range(len(requests)))
        if self._on_output is not None:
            return numbers
        return sorted(numbers, key=lambda number: -requests[number].source_length)

    def _submit(self, index: int, request: Request) -> bool:
        """False where the queue is full and a request of our own will make room. A call of which nothing runs is
        refused instead: waiting would be a second, hidden queue."""
        timeout = self._call.queue_timeout
        request.deadline = self._deadline
        request.priority = self._call.priority
        request.tenant = self._call.tenant
        # From when it is submitted: a long call's later requests wait behind its own first ones.
        request.queue_deadline = None if timeout is None else time.monotonic() + timeout
        request.streams = self._on_output is not None
        request.loop = self._loop
        request.on_output = partial(self._take, index)
        if request.options is not None and (limit := request.options.time_limit) is not None:
            request.stop_at = self._started + limit  # it is the call's, and a part of a long text may be submitted late
        try:
            self._engine.submit(request)
        except Overloaded:
            if not self._pending:
                raise
            return False
        # Not too late: an output is delivered by the loop, which is ours until the next `await`.
        self._pending[index] = request.id
        return True

    async def _progress(self) -> None:
        """Waits until something was answered; raises the first failure."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _take(self, index: int, output: Output) -> None:
        if isinstance(output, Piece | TraceStep):
            assert self._on_output is not None
            return self._on_output(index, output)
        del self._pending[index]
        if isinstance(output, Exception):
            self._failure = self._failure or output
        else:
            self._answers[index] = output
            if isinstance(output, Result):
                timings = output.timings
                self._timings.append((time.monotonic(), timings.queue, timings.encode, timings.decode))
            if self._on_output is not None:
                self._on_output(index, output)
        self._changed.set()


async def decode_all(
    engine: AnyEngine,
    requests: Sequence[Request],
    deadline: float | None,
    max_in_flight: int,
    ends: Callable[[int, Piece], bool] | None = None,
) -> list[Result]:
    """`ends` is shown every piece of a hypothesis as it comes, and says whether no more is wanted of it."""
    if ends is not None:
        return await _decode_until(engine, requests, deadline, max_in_flight, ends)
    answers = await RequestGroup(engine, deadline).run(requests, max_in_flight)
    return [answer for answer in answers if isinstance(answer, Result)]


async def _decode_until(
    engine: AnyEngine,
    requests: Sequence[Request],
    deadline: float | None,
    max_in_flight: int,
    ends: Callable[[int, Piece], bool],
) -> list[Result]:
    results: dict[int, Result] = {}
    steps: dict[int, list[TraceStep]] = {}  # of those who are traced: a result has only what was not handed out before

    def take(index: int, output: Output) -> None:
        if isinstance(output, Piece) and ends(index, output):
            group.stop(index, output.index)
        elif isinstance(output, TraceStep):
            steps.setdefault(index, []).append(output)
        elif isinstance(output, Result):
            trace = output.trace
            whole = trace and replace(trace, steps=(*steps.get(index, ()), *trace.steps))
            results[index] = replace(output, trace=whole)

    group = RequestGroup(engine, deadline, take)
    await group.run(requests, max_in_flight)
    return [results[index] for index in range(len(requests))]


async def score_all(
    engine: AnyEngine, requests: Sequence[Request], deadline: float | None, max_in_flight: int
) -> list[Scores]:
    answers = await RequestGroup(engine, deadline).run(requests, max_in_flight)
    return [answer for answer in answers if isinstance(answer, Scores)]


async def read_all(
    engine: AnyEngine, requests: Sequence[Request], deadline: float | None, max_in_flight: int
) -> list[Pooled]:
    answers = await RequestGroup(engine, deadline).run(requests, max_in_flight)
    return [answer for answer in answers if isinstance(answer, Pooled)]
