"""Two replicas with exact step times: cancellation, deadlines, a killed replica, a rolling update."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from tests.ray.inside.callers import TEXT, Callers
from tests.ray.inside.cluster import GRPC, cluster, deploy, instances, metrics, replica_processes, replicas
from tests.support.processes import eventually

FAKE = {"fake": True, "fake_step_ms": 20, "fake_slots": 8}
LONG = "x" * 1500  # half a minute
_UNDER_LOAD = 3.0  # seconds of calls before and behind what is done to them


@pytest.fixture(scope="module", autouse=True)
def application() -> Iterator[None]:
    with cluster():
        deploy(FAKE, num_replicas=2)
        yield


def ended(*outcomes: str) -> float:
    """Requests, as both replicas have reported them: one that is late with its report is missing in the page."""
    eventually(lambda: len(instances(metrics())) == 2, "both replicas have reported")
    found = metrics()
    return sum(found("beamline_requests_total", outcome=outcome) for outcome in outcomes)


async def _all(stream: Any) -> None:
    async for _ in stream:
        pass


def test_metrics_of_both_replicas_have_the_names_of_a_server() -> None:
    eventually(lambda: len(instances(metrics())) == 2, "both replicas have reported")
    found = metrics()
    assert found("beamline_slots", model="fake") == 16
    assert {"beamline_slots", "beamline_queue_length", "beamline_build_info"} <= {name for name, _ in found.samples}


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cancelled_call_frees_its_slot(streaming: bool) -> None:
    before = ended("cancelled")
    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub = InferenceStub(channel)
        request = pb.TranslateRequest(inputs=[pb.Input(text=LONG)])
        call = stub.TranslateStream(request) if streaming else stub.Translate(request)
        if streaming:
            assert (await call.read()).text == "x"
        else:
            await asyncio.sleep(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await (call.read() if streaming else call)
    eventually(lambda: ended("cancelled") == before + 1, "the engine gave it up")
    eventually(lambda: metrics()("beamline_active_slots") == 0, "its slot is free")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_deadline_reaches_the_engine(streaming: bool) -> None:
    """The engine ends it by its own clock, and not because the client has gone."""
    before = ended("deadline", "cancelled")
    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub = InferenceStub(channel)
        request = pb.TranslateRequest(inputs=[pb.Input(text=LONG)])
        began = time.monotonic()
        call = _all(stub.TranslateStream(request, timeout=1)) if streaming else stub.Translate(request, timeout=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 5
    eventually(lambda: ended("deadline", "cancelled") == before + 1, "the engine gave it up")


async def test_a_call_that_could_not_be_answered_in_time_is_refused_at_once() -> None:
    """Only who knows the deadline can tell: 20 requests for each slot wait before it."""
    async with grpc.aio.insecure_channel(GRPC) as channel:
        stub = InferenceStub(channel)
        # So that each replica knows how long a request takes.
        short = [stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text=TEXT)])) for _ in range(16)]
        await asyncio.gather(*short)
        many = pb.TranslateRequest(inputs=[pb.Input(text=LONG)] * 64)
        crowd = [stub.Translate(many) for _ in range(6)]
        await asyncio.sleep(2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text=TEXT)]), timeout=2)
        for call in crowd:
            call.cancel()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, raised.value
    assert int(dict(raised.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    eventually(lambda: metrics()("beamline_active_slots") == 0, "all slots are free")


def test_no_unary_call_fails_when_a_replica_is_killed() -> None:
    """Those that ran on it run again on another one. A stream that has begun can't: it fails, and says that one may try
    again; so the killed one did have calls."""
    with Callers(unary=8, streams=8, http_calls=2) as callers:
        time.sleep(_UNDER_LOAD)
        victim = replica_processes()[0]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: replicas() == 1, "Ray has noticed")
        eventually(lambda: replicas() == 2, "another one has come")
        time.sleep(_UNDER_LOAD)
    assert victim not in replica_processes()
    assert callers.failed("unary") == []
    broken = callers.failed("stream")
    assert broken == ["stream UNAVAILABLE: the replica that ran this call ended; try again"]
    assert 1 <= callers.outcomes[broken[0]] <= 8
    assert sum(callers.outcomes[each] for each in callers.failed("http")) <= 2
    assert callers.outcomes["unary OK"] > 20


def test_no_call_fails_while_the_application_is_replaced() -> None:
    before = set(replica_processes())
    with Callers(unary=8, streams=4, http_calls=2) as callers:
        time.sleep(_UNDER_LOAD)
        deploy({**FAKE, "fake_step_ms": 15}, num_replicas=2)
        eventually(lambda: not before & set(replica_processes()), "the old ones have gone")
        time.sleep(_UNDER_LOAD)
    assert len(replica_processes()) == 2
    assert {each for each in callers.outcomes if not each.endswith(" OK")} == set()
    assert all(callers.outcomes[f"{kind} OK"] > 10 for kind in ("unary", "stream", "http"))
