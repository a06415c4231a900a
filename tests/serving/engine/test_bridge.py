from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from beamline.serving.engine.async_engine import Job, Resolve, answer_all, decode_all
from beamline.serving.engine.request import DecodingOptions, Request, Result
from beamline.serving.errors import ComputeError, Overloaded, ShuttingDown
from tests.serving.doubles import EngineDouble, echo

OPTIONS = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=20)


def jobs(count: int, options: DecodingOptions = OPTIONS) -> list[Job]:
    return [Job((index + 3, 2), options) for index in range(count)]


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
        results = await decode_all(double, jobs(50), deadline=12.5, max_in_flight=7)
    assert [result.hypotheses[0].tokens[0] for result in results] == list(range(3, 53))
    assert {request.deadline for request in double.submitted} == {12.5}
    assert double.most_waiting <= 7


async def test_the_longest_are_sent_first() -> None:
    several = [Job(tuple(range(3, 3 + length)), OPTIONS) for length in (2, 9, 1, 5)]
    async with engine() as double:
        results = await decode_all(double, several, None, max_in_flight=2)
    assert [len(request.source) for request in double.submitted] == [9, 5, 2, 1]
    assert [len(result.hypotheses[0].tokens) for result in results] == [2, 9, 1, 5]


async def test_no_more_than_the_window_are_with_the_engine() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, jobs(10), None, max_in_flight=3))
        await double.until(lambda: len(double.submitted) == 3)
        double.release()
        assert len(await task) == 10


async def test_a_failure_fails_the_call_and_cancels_its_siblings() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, jobs(3), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 3)
        double.submitted[1].resolve(ComputeError("broken"))
        with pytest.raises(ComputeError, match="broken"):
            await task
    assert double.cancelled == [double.submitted[0].id, double.submitted[2].id]


async def test_a_cancelled_call_cancels_its_requests() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, jobs(2), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert double.cancelled == [request.id for request in double.submitted]


async def test_a_call_of_which_nothing_runs_is_refused_when_the_queue_is_full() -> None:
    async with engine(capacity=0) as double:
        with pytest.raises(Overloaded):
            await decode_all(double, jobs(1), None, max_in_flight=10)


async def test_a_call_that_is_longer_than_the_queue_waits_for_itself() -> None:
    async with engine(held=True, capacity=2) as double:
        task = asyncio.create_task(decode_all(double, jobs(9), None, max_in_flight=10))
        await double.until(lambda: len(double.submitted) == 2)
        double.release()
        assert len(await task) == 9


async def test_a_refusal_midway_cancels_what_was_submitted() -> None:
    async with engine(held=True) as double:
        task = asyncio.create_task(decode_all(double, jobs(4), None, max_in_flight=2))
        await double.until(lambda: len(double.submitted) == 2)
        double.draining = True
        double.submitted[0].resolve(echo(double.submitted[0]))
        with pytest.raises(ShuttingDown):
            await task
    assert double.cancelled == [double.submitted[1].id]


async def test_the_time_limit_is_the_calls_not_each_parts() -> None:
    limited = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=20, time_limit=30.0)
    async with engine(held=True) as double:
        began = time.monotonic()
        task = asyncio.create_task(decode_all(double, jobs(2, limited), None, max_in_flight=1))
        await double.until(lambda: len(double.submitted) == 1)
        double.release()
        await task
        spent = time.monotonic() - began
    first, second = (request.options.time_limit for request in double.submitted)
    assert first is not None
    assert second is not None
    assert 30.0 - spent <= second < first <= 30.0


async def test_answers_for_a_loop_that_is_closed_are_dropped() -> None:
    double = EngineDouble(held=True)

    def abandon() -> None:
        async def ask() -> None:
            task = asyncio.create_task(decode_all(double, jobs(1), None, max_in_flight=1))
            await double.until(lambda: len(double.submitted) == 1)
            task.cancel()

        asyncio.run(ask())

    await asyncio.to_thread(abandon)
    double.submitted[0].resolve(ComputeError("late"))


# -- requests with one answer each: texts that are read or scored ----------------------------------------------------


class Readers:
    """Room for two; the tests answer."""

    def __init__(self) -> None:
        self.waiting: dict[int, Resolve[int]] = {}
        self.most = 0
        self.cancelled: list[int] = []

    def submit(self, number: int, resolve: Resolve[int]) -> int:
        if len(self.waiting) == 2:
            raise Overloaded("full")
        self.waiting[number] = resolve
        self.most = max(self.most, len(self.waiting))
        return 100 + number

    async def answer(self, *numbers: int) -> None:
        for number in numbers:
            while number not in self.waiting:
                await asyncio.sleep(0)
            self.waiting.pop(number)(10 * number)


async def test_a_call_longer_than_the_queue_gets_its_answers_in_order() -> None:
    readers = Readers()
    asking = asyncio.create_task(answer_all(5, readers.submit, readers.cancelled.append, max_in_flight=64))
    await readers.answer(1, 0, 2, 3, 4)
    assert await asking == [0, 10, 20, 30, 40]
    assert readers.most == 2
    assert readers.cancelled == []


async def test_a_failure_among_them_cancels_the_rest() -> None:
    readers = Readers()
    asking = asyncio.create_task(answer_all(2, readers.submit, readers.cancelled.append, max_in_flight=64))
    while len(readers.waiting) < 2:
        await asyncio.sleep(0)
    readers.waiting[1](ComputeError("broken"))
    with pytest.raises(ComputeError, match="broken"):
        await asking
    assert readers.cancelled == [100]
    refused = answer_all(1, readers.submit, readers.cancelled.append, max_in_flight=64)
    with pytest.raises(Overloaded):  # two others wait, and none of them is ours
        await refused
