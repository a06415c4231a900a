"""Messages of every kind to every method: each gets an answer that a caller may see, and the server lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import beamline_pb2 as pb
from protos import beamline_pb2_grpc
from serving.http.gateway import PATHS
from serving.security.access import scope_of
from serving.security.tokens import Scope
from tests.serving.security.test_every_rpc import reflected
from tests.support.fuzz import Fuzz
from tests.support.processes import ServerProcess, eventually, serving

_C = grpc.StatusCode
ALLOWED = {
    _C.OK,
    _C.INVALID_ARGUMENT,
    _C.NOT_FOUND,
    _C.FAILED_PRECONDITION,
    _C.RESOURCE_EXHAUSTED,
    _C.UNAVAILABLE,
    _C.UNIMPLEMENTED,
}
BATCH = 100  # messages of one example
AT_ONCE = 20
HANG = 60.0  # seconds; an answer that takes so long is none


@dataclass(frozen=True)
class Method:
    name: str
    request: Any  # its descriptor
    kind: str  # as grpc names it


async def methods_of(address: str) -> list[Method]:
    """By reflection. What changes the server is left out: a test that unloads the model tests nothing afterwards."""
    async with grpc.aio.insecure_channel(address) as channel:
        methods = await reflected(channel, "none")
    return [
        Method(
            name,
            method.input_type,
            "_".join(
                "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
            ),
        )
        for name, method in methods.items()
        if scope_of(name) is not Scope.ADMIN
    ]


async def send(channel: Any, method: Method, message: bytes) -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield message

    call = getattr(channel, method.kind)(method.name, None, None)(
        stream() if method.kind.startswith("stream") else message, timeout=HANG
    )
    try:
        if method.kind.endswith("unary"):
            await call
        else:
            async for _ in call:
                if method.name.endswith("/Watch"):  # never ends by itself
                    call.cancel()
                    return
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    else:
        code, details = _C.OK, ""
    where = f"{method.name} {message.hex()}: {code} {details}"
    assert code in ALLOWED, where
    assert "Traceback" not in details, where
    assert 'File "' not in details, where


async def send_batch(address: str, methods: list[Method], seed: int) -> None:
    fuzz = Fuzz(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        waiting: list[Any] = []
        for _ in range(BATCH):
            method = fuzz.random.choice(methods)
            waiting.append(send(channel, method, fuzz.data(method.request)))
            if len(waiting) == AT_ONCE:
                await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)


async def send_json(address: str, seed: int, count: int) -> None:
    fuzz = Fuzz(seed)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=HANG) as client:
        for _ in range(count):
            path = fuzz.random.choice(PATHS)
            body = json_format.MessageToJson(fuzz.message(path.request)).encode()
            if fuzz.random.random() < 0.5:
                body = fuzz.spoiled(body)
            stream = {"accept": "text/event-stream"} if fuzz.random.random() < 0.3 else {}
            answer = await client.post(path.path, content=body, headers=stream)
            assert answer.status_code in (200, 400, 404, 413, 429, 501, 503), (path, body, answer.text)
            assert "Traceback" not in answer.text


@contextmanager
def fuzzed(folder: Path) -> Iterator[tuple[ServerProcess, list[Method]]]:
    """A real server, that must still be well at the end."""
    with serving(folder / "log.txt", "--fake", "--max-queue", "64") as server:
        yield server, asyncio.run(methods_of(server.grpc))
        with grpc.insecure_channel(server.grpc) as channel:
            good = pb.TranslateRequest(inputs=[pb.Input(text="good")])
            answer = beamline_pb2_grpc.InferenceStub(channel).Translate(good, timeout=HANG)
        assert answer.translations[0].hypotheses[0].text == "good"
        eventually(lambda: server.metrics()("beamline_active_slots") == 0, "nobody is left")
    assert "Traceback" not in (folder / "log.txt").read_text()


def test_a_thousand_messages(tmp_path: Path) -> None:
    with fuzzed(tmp_path) as (server, methods):
        services = {method.name.split("/")[1] for method in methods}
        assert services >= {"beamline.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"}
        for seed in range(10):
            asyncio.run(send_batch(server.grpc, methods, seed))
        asyncio.run(send_json(server.http, 0, 200))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_messages(tmp_path: Path) -> None:
    with fuzzed(tmp_path) as (server, methods):
        for seed in range(100):  # every kind of message has been seen, every cache is full
            asyncio.run(send_batch(server.grpc, methods, seed))
        early = server.resident_bytes()

        @settings(
            max_examples=100_000 // BATCH,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
        @given(seed=st.integers(1000, 2**63))
        def fuzz(seed: int) -> None:
            asyncio.run(send_batch(server.grpc, methods, seed))

        fuzz()
        asyncio.run(send_json(server.http, 1, 5000))
        growth = server.resident_bytes() - early
        print(f"resident memory grew by {growth / 2**20:.1f} MiB")
        assert growth < 32 * 2**20
