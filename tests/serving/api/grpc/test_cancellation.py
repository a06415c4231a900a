from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.errors import DeadlinePassed
from tests.serving.doubles import EngineDouble, connected, running

TWO = pb.TranslateRequest(inputs=[pb.Input(text="a"), pb.Input(text="b")])


async def test_a_client_that_goes_away_frees_all_its_requests() -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server, connected(server) as stub:
        call = stub.Translate(TWO)
        task = asyncio.ensure_future(call)
        await engine.until(lambda: len(engine.submitted) == 2)
        call.cancel()
        await engine.until(lambda: len(engine.cancelled) == 2)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.cancelled == [request.id for request in engine.submitted]


async def test_a_lost_connection_frees_all_its_requests() -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server:
        async with connected(server) as stub:
            task = asyncio.ensure_future(stub.Translate(TWO))
            await engine.until(lambda: len(engine.submitted) == 2)
        await engine.until(lambda: len(engine.cancelled) == 2)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await task


async def test_the_deadline_reaches_the_engine() -> None:
    engine = EngineDouble()
    async with running(engine) as server, connected(server) as stub:
        await stub.Translate(TWO)
        asked = time.monotonic()
        await stub.Translate(TWO, timeout=100)
        answered = time.monotonic()
    first, second, deadline, last = (request.deadline for request in engine.submitted)
    assert (first, second) == (None, None)
    assert deadline == last
    assert deadline is not None
    assert asked + 99 <= deadline <= answered + 101  # gRPC rounds what it sends


async def test_a_deadline_that_passes_frees_the_requests() -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server, connected(server) as stub:
        seconds = 0.3
        while not engine.submitted:  # on a busy machine it may be over before the engine has heard of the call
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Translate(TWO, timeout=seconds)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            seconds *= 2
        await engine.until(lambda: len(engine.cancelled) == len(engine.submitted))


async def test_a_deadline_that_the_engine_notices_is_deadline_exceeded() -> None:
    engine = EngineDouble(answer=lambda request: DeadlinePassed("the deadline is over"))
    async with running(engine) as server, connected(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(TWO, timeout=50)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_others_are_not_disturbed() -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server, connected(server) as stub:
        leaving, staying = stub.Translate(TWO), stub.Translate(TWO)
        tasks = [asyncio.ensure_future(leaving), asyncio.ensure_future(staying)]
        await engine.until(lambda: len(engine.submitted) == 4)
        leaving.cancel()
        await engine.until(lambda: len(engine.cancelled) == 2)
        engine.release()
        response = await tasks[1]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
    assert [each.hypotheses[0].text for each in response.translations] == ["a", "b"]
