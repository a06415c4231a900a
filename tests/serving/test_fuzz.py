"""Messages of every kind to every method: each gets an answer that a caller may see, and the server lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamline.serving.api.http.endpoints import ENDPOINTS
from beamline.serving.security.access import Scope, scope_of
from tests.serving.security.test_every_rpc import reflected
from tests.support.fuzz import Fuzz
from tests.support.fuzz_corpus import ECHO, POOLED
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


async def send(channel: Any, method: Method, message: bytes) -> grpc.StatusCode:
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
                    return _C.OK
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    else:
        code, details = _C.OK, ""
    where = f"{method.name} {message.hex()}: {code} {details}"
    assert code in ALLOWED, where
    assert "Traceback" not in details, where
    assert 'File "' not in details, where
    return code


@dataclass(frozen=True)
class Target:
    server: ServerProcess
    methods: list[Method]
    corpus: Sequence[Message]

    def takes_corpus(self) -> Target:
        """Only those methods that take what the corpus has."""
        names = {message.DESCRIPTOR.name for message in self.corpus}
        return replace(self, methods=[method for method in self.methods if method.request.name in names])

    async def send_corpus(self) -> None:
        """As it is: each of its messages is answered, by one of the methods that take it."""
        async with grpc.aio.insecure_channel(self.server.grpc) as channel:
            for message in self.corpus:
                data = message.SerializeToString()
                takers = [method for method in self.methods if method.request.name == message.DESCRIPTOR.name]
                assert _C.OK in [await send(channel, method, data) for method in takers], message

    async def send_batch(self, seed: int) -> None:
        fuzz = Fuzz(seed, self.corpus)
        async with grpc.aio.insecure_channel(self.server.grpc) as channel:
            waiting: list[Any] = []
            for _ in range(BATCH):
                method = fuzz.random.choice(self.methods)
                waiting.append(send(channel, method, fuzz.data(method.request)))
                if len(waiting) == AT_ONCE:
                    await asyncio.gather(*waiting)
                    waiting = []
            await asyncio.gather(*waiting)

    async def send_json(self, seed: int, count: int) -> None:
        fuzz = Fuzz(seed, self.corpus)
        takers = {method.request.name for method in self.methods}
        endpoints = [each for each in ENDPOINTS if each.unary.request.DESCRIPTOR.name in takers]
        async with httpx.AsyncClient(base_url=f"http://{self.server.http}", timeout=HANG) as client:
            for _ in range(count):
                endpoint = fuzz.random.choice(endpoints)
                descriptor: Any = endpoint.unary.request.DESCRIPTOR
                body = json_format.MessageToJson(fuzz.request(descriptor)).encode()
                if fuzz.random.random() < 0.5:
                    body = fuzz.spoiled(body)
                stream = {"accept": "text/event-stream"} if fuzz.random.random() < 0.3 else {}
                answer = await client.post(endpoint.path, content=body, headers=stream)
                assert answer.status_code in (200, 400, 404, 413, 429, 501, 503), (endpoint, body, answer.text)
                assert "Traceback" not in answer.text


@contextmanager
def fuzzed(folder: Path, corpus: Sequence[Message], *arguments: str) -> Iterator[Target]:
    """A real server, that must still be well at the end."""
    with serving(folder / "log.txt", *arguments, "--max-queue", "64") as server:
        target = Target(server, asyncio.run(methods_of(server.grpc)), corpus)
        asyncio.run(target.send_corpus())
        yield target
        asyncio.run(target.send_corpus())
        eventually(lambda: server.metrics()("beamline_active_slots") == 0, "no slot is in use")
    assert "Traceback" not in (folder / "log.txt").read_text()


def test_a_thousand_messages(tmp_path: Path) -> None:
    with fuzzed(tmp_path, ECHO, "--fake") as target:
        services = {method.name.split("/")[1] for method in target.methods}
        assert services >= {"beamline.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"}
        for seed in range(10):
            asyncio.run(target.send_batch(seed))
        asyncio.run(target.send_json(0, 200))


def test_messages_to_a_model_that_classifies_and_embeds(tmp_path: Path, pooled_repository: Path) -> None:
    with fuzzed(tmp_path, POOLED, "--repo", str(pooled_repository), "--threads", "1") as served:
        target = served.takes_corpus()
        names = {method.name.rpartition("/")[2] for method in target.methods}
        assert names == {"Classify", "Embed", "ModelInfer", "ModelStreamInfer"}
        for seed in range(3):
            asyncio.run(target.send_batch(seed))
        asyncio.run(target.send_json(0, 50))


def send_many(target: Target, messages: int) -> None:
    for seed in range(messages // 1000):  # every kind of message has been seen, every cache is full
        asyncio.run(target.send_batch(seed))
    early = target.server.resident_bytes()

    @settings(
        max_examples=messages // BATCH,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(seed=st.integers(1000, 2**63))
    def fuzz(seed: int) -> None:
        asyncio.run(target.send_batch(seed))

    fuzz()
    asyncio.run(target.send_json(1, messages // 20))
    growth = target.server.resident_bytes() - early
    print(f"resident memory grew by {growth / 2**20:.1f} MiB")
    assert growth < 32 * 2**20


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_messages(tmp_path: Path) -> None:
    with fuzzed(tmp_path, ECHO, "--fake") as target:
        send_many(target, 100_000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_thousand_messages_to_a_model_that_classifies_and_embeds(
    tmp_path: Path, pooled_repository: Path
) -> None:
    with fuzzed(tmp_path, POOLED, "--repo", str(pooled_repository), "--threads", "1") as target:
        send_many(target.takes_corpus(), 20_000)
