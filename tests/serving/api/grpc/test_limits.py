"""Urgency, patience and limits, through a real channel."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.models.loader import Observe, real_makers
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, connected, eventually, running, started

ONE = pb.TranslateRequest(inputs=[pb.Input(text="a")])


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def trailing(error: grpc.aio.AioRpcError) -> dict[str, object]:
    return dict(error.trailing_metadata())


async def test_urgency_and_patience_reach_the_engine() -> None:
    engine = EngineDouble()
    async with running(engine) as server, connected(server) as stub:
        await stub.Translate(ONE)
        await stub.Translate(ONE, metadata=(("x-beamline-priority", "0"), ("x-beamline-queue-timeout-ms", "60000")))
    default, urgent = engine.submitted
    assert (default.priority, default.queue_deadline) == (1, None)
    assert urgent.priority == 0
    assert urgent.queue_deadline is not None


async def test_and_those_of_texts_to_be_scored() -> None:
    engine = EngineDouble()
    texts = pb.ScoreRequest(texts=[pb.Input(text="a"), pb.Input(text="b")], sources=[pb.Input(text="c")])
    async with running(engine) as server, connected(server) as stub:
        await stub.Score(texts)
        await stub.Score(texts, metadata=(("x-beamline-priority", "3"), ("x-beamline-queue-timeout-ms", "60000")))
    assert [(each.priority, each.queue_deadline is None) for each in engine.scored] == [(1, True)] * 2 + [
        (3, False)
    ] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-beamline-priority", "4"),
        ("x-beamline-priority", "-1"),
        ("x-beamline-priority", "high"),
        ("x-beamline-queue-timeout-ms", "0"),
        ("x-beamline-queue-timeout-ms", "9" * 30),
    ],
)
async def test_what_makes_no_sense_is_refused_with_what_is_allowed(name: str, value: str) -> None:
    async with running(EngineDouble()) as server, connected(server) as stub:
        error = await refusal(stub.Translate(ONE, metadata=((name, value),)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{name} is" in (error.details() or "")
    assert "whole number from" in (error.details() or "")


@pytest.mark.parametrize("given", ["my-id.7", "", "no spaces", "x" * 65])
async def test_the_request_id_comes_back(given: str) -> None:
    async with running(EngineDouble()) as server, connected(server) as stub:
        call = stub.Translate(ONE, metadata=(("x-request-id", given),))
        await call
        answered = dict(await call.trailing_metadata())["x-request-id"]
        error = await refusal(stub.Translate(pb.TranslateRequest(), metadata=(("x-request-id", given),)))
    assert (answered == given) is (given == "my-id.7")
    assert (trailing(error)["x-request-id"] == given) is (given == "my-id.7")
    assert len(answered) == (7 if given == "my-id.7" else 16)


async def test_one_client_can_not_have_more_than_its_share() -> None:
    engine = EngineDouble(held=True)
    async with running(engine, max_calls_per_client=2) as server, connected(server) as stub:
        inside = [asyncio.ensure_future(stub.Translate(ONE)) for _ in range(2)]
        await engine.until(lambda: len(engine.submitted) == 2)
        error = await refusal(stub.Translate(ONE))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 calls running" in (error.details() or "")
        engine.release()
        await asyncio.gather(*inside)
        assert (await stub.Translate(ONE)).translations[0].hypotheses[0].text == "a"


async def test_a_call_has_only_so_many_texts() -> None:
    async with running(EngineDouble(), text=TextLimits(max_inputs=2)) as server, connected(server) as stub:
        error = await refusal(stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")] * 3)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 2" in (error.details() or "")


class Gate:
    """A device that waits before every step until the test lets it go on."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waits = threading.Event()  # a step has begun

    def __call__(self, seconds: float) -> None:
        self.waits.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def gated(slots: int, queue: int) -> AsyncIterator[tuple[Server, Gate, Engine]]:
    """The real engine on a gated device."""
    gate = Gate()
    config = ServeConfig(fake=True, grpc_port=0, metrics_port=0)

    manifest = fake_manifest()
    backend = FakeBackend(manifest, step_seconds=1.0, sleep=gate)
    engine = Engine(manifest, backend, Plan.of(manifest, slots), max_queue=queue)

    def fake(observe: Observe) -> Engine:
        engine.observe = observe
        return engine

    async with started(Server(config, replace(real_makers(config), fake=fake))) as server:
        try:
            yield server, gate, engine
        finally:
            gate.open()


async def fill(stub: beamline_pb2_grpc.InferenceStub, gate: Gate, count: int) -> list[Any]:
    """That many calls inside, the first of them decoding."""
    first = asyncio.ensure_future(stub.Translate(ONE))
    await asyncio.to_thread(gate.waits.wait, 60)
    return [first, *(asyncio.ensure_future(stub.Translate(ONE)) for _ in range(count - 1))]


async def test_beyond_the_queue_everybody_is_refused_at_once_and_told_when_to_come_back() -> None:
    """Five times what fits: while nothing moves, exactly the queue's length is let in, and all those are answered."""
    slots, queue = 2, 6
    async with gated(slots, queue) as (server, gate, _), connected(server) as stub:
        # The first is in a slot, the others wait: the engine can't admit them while its step waits for us.
        calls = await fill(stub, gate, 5 * (slots + queue))
        finished, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        while len(finished) < len(calls) - 1 - queue:
            finished, _ = await asyncio.wait(calls, timeout=0.01)
        errors = [call.exception() for call in finished]
        gate.open()
        answers = [await call for call in calls if call not in finished]
    assert len(answers) == 1 + queue
    assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(int(trailing(error)["grpc-retry-pushback-ms"]) >= 1 for error in errors)  # type: ignore[call-overload]
    assert {answer.translations[0].hypotheses[0].text for answer in answers} == {"a"}


async def test_a_burst_beyond_what_grpc_itself_would_hold_is_answered_call_by_call() -> None:
    """All of it arrives while the event loop does something else, so that it waits inside gRPC's library, whose own
    limits (1,000, and 3,000) would drop calls as CANCELLED."""
    queue, count = 6, 2000
    over = threading.Semaphore(0)  # as often as a call was answered
    async with gated(1, queue) as (server, gate, _):
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            first = stub.Translate.future(ONE)
            await asyncio.to_thread(gate.waits.wait, 60)
            calls = [stub.Translate.future(ONE) for _ in range(count)]  # no turn of the loop in between
            for call in calls:
                call.add_done_callback(lambda _: over.release())
            assert await asyncio.to_thread(lambda: all(over.acquire(timeout=60) for _ in range(count - queue)))
            gate.open()
            codes = Counter([await asyncio.to_thread(call.code) for call in (first, *calls)])
            assert codes == {grpc.StatusCode.OK: 1 + queue, grpc.StatusCode.RESOURCE_EXHAUSTED: count - queue}
            refused = [call for call in calls if call.code() is not grpc.StatusCode.OK]
            hints = [int(dict(call.trailing_metadata())["grpc-retry-pushback-ms"]) for call in refused]
        assert min(hints) >= 1
        sample, method = server.metrics.registry.get_sample_value, "/beamline.v1.Inference/Translate"
        counted = [("OK", 1 + queue), ("RESOURCE_EXHAUSTED", count - queue)]
        await eventually(
            lambda: all(
                sample("beamline_calls_total", {"method": method, "code": code}) == found for code, found in counted
            )
        )
        assert sample("beamline_refused_total", {"reason": "overloaded"}) == count - queue


async def test_who_waits_longer_than_it_wants_to_is_refused() -> None:
    async with gated(slots=1, queue=8) as (server, gate, engine), connected(server) as stub:
        calls = await fill(stub, gate, 1)
        impatient = stub.Translate(ONE, metadata=(("x-beamline-queue-timeout-ms", "1"),))
        metrics = server.metrics.registry
        waiting = asyncio.ensure_future(refusal(impatient))
        patient = asyncio.ensure_future(stub.Translate(ONE))
        while engine._queue.waiting < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.002)  # its millisecond is over then
        gate.open()
        error = await waiting
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue timeout" in (error.details() or "")
        await asyncio.gather(*calls, patient)
        timed_out = {"model": "fake", "outcome": "queue_timeout"}
    assert metrics.get_sample_value("beamline_requests_total", timed_out) == 1
