from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from beamline.serving.engine.async_engine import decode_all, score_all
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result, Scores
from beamline.serving.engine.request import Request, RequestOutput, deliver
from beamline.serving.errors import ComputeError, Overloaded, ShuttingDown
from tests.serving.doubles import EngineDouble, echo

OPTIONS = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=20)


def requests(count: int, options: DecodingOptions = OPTIONS) -> list[Request]:
    return [Request((index + 3, 2), options) for index in range(count)]


def answer(request: Request, output: Output) -> None:
    """As an engine's thread does."""
    deliver([RequestOutput(request, output)])


@asynccontextmanager
async def engine(
    *, answer: Callable[[Request], Result | Exception] = echo, held: bool = False, capacity: int = 1000
) -> AsyncIterator[EngineDouble]:
    double = EngineDouble(answer=answer, held=held, capacity=capacity)
    double.start()
    try:
        yield double
    finally:
        double.stop()


async def test_results_come_in_the_order_of_the_jobs() -> None:
    async with engine() as double:
        results = await decode_all(double, requests(50), deadline=12.5, max_in_flight=7)
    assert [result.hypotheses[0].tokens[0] for result in results] == list(range(3, 53))
    assert {request.deadline for request in double.submitted} == {12.5}
    assert double.most_waiting <= 7


async def test_the_longest_are_sent_first() -> None:
    several = [Request(tuple(range(3, 3 + length)), OPTIONS) for length in (2, 9, 1, 5)]
    async with engine() as double:
        results = await decode_all(double, several, None, max_in_flight=2)
    assert [len(request.source) for request in double.submitted] == [9, 5, 2, 1]
    assert [len(result.hypotheses[0].tokens) for result in results] == [2, 9, 1, 5]


async def test_no_more_than_the_window_are_with_the_engine() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, requests(10), None, max_in_flight=3))
        await double.until(lambda: len(double.submitted) == 3)
        double.release()
        assert len(await task) == 10


async def test_a_failure_fails_the_call_and_cancels_its_siblings() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, requests(3), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 3)
        answer(double.submitted[1], ComputeError("broken"))
        with pytest.raises(ComputeError, match="broken"):
            await task
    assert double.cancelled == [double.submitted[0].id, double.submitted[2].id]


async def test_a_cancelled_call_cancels_its_requests() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, requests(2), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert double.cancelled == [request.id for request in double.submitted]


async def test_a_call_of_which_nothing_runs_is_refused_when_the_queue_is_full() -> None:
    async with engine(capacity=0) as double:
        with pytest.raises(Overloaded):
            await decode_all(double, requests(1), None, max_in_flight=10)


async def test_a_call_that_is_longer_than_the_queue_waits_for_itself() -> None:
    async with engine(held=True, capacity=2) as double:
        task = asyncio.create_task(decode_all(double, requests(9), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 2)
        double.release()
        assert len(await task) == 9


async def test_a_refusal_midway_cancels_what_was_submitted() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, requests(4), None, max_in_flight=2))
        await double.until(lambda: len(double.submitted) == 2)
        double.draining = True
        answer(double.submitted[0], echo(double.submitted[0]))
        with pytest.raises(ShuttingDown):
            await task
    assert double.cancelled == [double.submitted[1].id]


async def test_the_time_limit_is_the_calls_not_each_parts() -> None:
    limited = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=20, time_limit=30.0)
    async with engine(held=True) as double:
        began = time.monotonic()
        task = asyncio.create_task(decode_all(double, requests(2, limited), None, max_in_flight=1))
        await double.until(lambda: len(double.submitted) == 1)
        double.release()
        await task
        spent = time.monotonic() - began
    first, second = (request.stop_at for request in double.submitted)
    assert first == second is not None
    assert began + 30.0 <= second <= began + 30.0 + spent


async def test_answers_for_a_loop_that_is_closed_are_dropped() -> None:
    double = EngineDouble(held=True)

    def abandon() -> None:
        async def ask() -> None:
            task = asyncio.create_task(decode_all(double, requests(1), None, max_in_flight=1))
            await double.until(lambda: len(double.submitted) == 1)
            task.cancel()

        asyncio.run(ask())

    await asyncio.to_thread(abandon)
    answer(double.submitted[0], ComputeError("late"))


# -- requests with one answer each: texts that are scored ------------------------------------------------------------


def texts(count: int) -> list[Request]:
    return [Request(target=(5, number), labels=(6, 7)) for number in range(count)]


class Readers:
    """Room for two; the tests answer."""

    def __init__(self) -> None:
        self.waiting: dict[int, Request] = {}
        self.most = 0
        self.cancelled: list[int] = []

    def submit(self, request: Request) -> None:
        if len(self.waiting) == 2:
            raise Overloaded("full")
        self.waiting[request.target[1]] = request
        self.most = max(self.most, len(self.waiting))

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def stop_hypothesis(self, request_id: int, index: int) -> None: ...

    async def answer(self, *numbers: int) -> None:
        for number in numbers:
            while number not in self.waiting:
                await asyncio.sleep(0)
            answer(self.waiting.pop(number), Scores((-number, -number)))


async def test_a_call_longer_than_the_queue_gets_its_answers_in_order() -> None:
    readers = Readers()
    asking = asyncio.create_task(score_all(readers, texts(5), None, max_in_flight=64))
    await readers.answer(1, 0, 2, 3, 4)
    assert [scores.log_probs[0] for scores in await asking] == [0, -1, -2, -3, -4]
    assert readers.most == 2
    assert readers.cancelled == []


async def test_a_failure_among_them_cancels_the_rest() -> None:
    readers = Readers()
    asking = asyncio.create_task(score_all(readers, texts(2), None, max_in_flight=64))
    while len(readers.waiting) < 2:
        await asyncio.sleep(0)
    answer(readers.waiting[1], ComputeError("broken"))
    with pytest.raises(ComputeError, match="broken"):
        await asking
    assert readers.cancelled == [readers.waiting[0].id]
    with pytest.raises(Overloaded):  # two others wait, and none of them is ours
        await score_all(readers, texts(1), None, max_in_flight=64)


async def test_a_steps_outputs_come_to_the_loop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens and requests a step has: one call to the event loop."""
    loop, calls = asyncio.get_running_loop(), 0
    call_soon = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> asyncio.Handle:
        nonlocal calls
        calls += 1
        return call_soon(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    taken: list[Output] = []
    several = [Request(on_output=taken.append, loop=loop) for _ in range(8)]
    deliver(RequestOutput(request, Scores((0.0,))) for request in several for _ in range(3))
    assert calls == 1
    await asyncio.sleep(0)
    assert len(taken) == 24
