"""Calls through the proxy's services into a replica's, over real gRPC, with everything but Ray itself in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from beamline.ray.calls import Calls
from beamline.ray.config import application
from beamline.ray.methods import handlers
from beamline.ray.proxy import services, services_by_model
from beamline.serving.api.grpc.health import Health
from beamline.serving.api.grpc.interceptor import GuardInterceptor
from beamline.serving.api.grpc.late_calls import LateCalls
from beamline.serving.service import Service

REQUEST = pb.TranslateRequest(model="fake", inputs=[pb.Input(text="abc")])


class Ray:
    """Takes the behaviours' place, as Ray does, and passes calls on; those of `dies` find that their replica died."""

    def __init__(self, server: grpc.aio.Server, replica: Calls) -> None:
        self._server, self._replica = server, replica
        self.dies = 0  # so many attempts
        self.after = 0  # answers of a stream before it dies
        self.attempts: Counter[str] = Counter()
        self.metadata: dict[str, str] = {}

    def add_generic_rpc_handlers(self, added: Iterable[Any]) -> None:
        for service in added:
            service._method_handlers = {
                path: each._replace(
                    unary_unary=self._unary(path.rpartition("/")[2]), unary_stream=self._stream(path.rpartition("/")[2])
                )
                for path, each in service._method_handlers.items()
            }
        self._server.add_generic_rpc_handlers(tuple(added))

    def _lost(self, name: str, context: Any) -> bool:
        self.attempts[name] += 1
        self.metadata = dict(context.invocation_metadata())
        self.dies -= 1
        return self.dies >= 0

    def _unary(self, name: str) -> Any:
        async def call(request: bytes, context: Any) -> bytes:
            if self._lost(name, context):
                context.set_code(grpc.StatusCode.INTERNAL)
                return b""
            return (await self._replica.unary(name, request, context)).SerializeToString()  # type: ignore[no-any-return]

        return call

    def _stream(self, name: str) -> Any:
        async def call(request: bytes, context: Any) -> AsyncIterator[bytes]:
            left = self.after if self._lost(name, context) else -1
            async for message in self._replica.stream(name, request, context):
                if left == 0:
                    break
                left -= 1
                yield message.SerializeToString()
            if left == 0:
                context.set_code(grpc.StatusCode.INTERNAL)

        return call


@pytest.fixture
async def ray(request: pytest.FixtureRequest) -> AsyncIterator[tuple[InferenceStub, Ray]]:
    service = Service(application({"fake": True}).config)
    service.start_engines()
    await service.load_models()
    interceptor = GuardInterceptor(service.guard, LateCalls(), service.workers.check, None)
    replica = Calls(handlers(service.inference, service.open_inference, service.guard, Health()), interceptor)
    server = grpc.aio.server()
    between = Ray(server, replica)
    getattr(request, "param", services)(object(), between)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield InferenceStub(channel), between
    await server.stop(None)
    await service.stop()


async def pieces(stub: InferenceStub) -> list[str]:
    return [reply.text async for reply in stub.TranslateStream(REQUEST)]


async def test_a_call_whose_replica_died_is_sent_to_another(ray: tuple[InferenceStub, Ray]) -> None:
    stub, between = ray
    between.dies = 2
    reply = await stub.Translate(REQUEST)
    assert reply.translations[0].hypotheses[0].text == "abc"
    between.dies = 1
    assert "".join(await pieces(stub)) == "abc"
    assert between.attempts == {"Translate": 3, "TranslateStream": 2}


async def test_three_times_at_most(ray: tuple[InferenceStub, Ray]) -> None:
    stub, between = ray
    between.dies = 9
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Translate(REQUEST)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "try again" in (raised.value.details() or "")
    assert between.attempts["Translate"] == 3


async def test_a_stream_that_has_begun_is_not_sent_again(ray: tuple[InferenceStub, Ray]) -> None:
    stub, between = ray
    between.dies, between.after = 1, 1
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pieces(stub)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert between.attempts["TranslateStream"] == 1


async def test_what_a_replica_refused_is_not_sent_again(ray: tuple[InferenceStub, Ray]) -> None:
    stub, between = ray
    refused = pb.TranslateRequest(model="none", inputs=REQUEST.inputs)
    for call in (stub.Translate(refused), stub.TranslateStream(refused).read()):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert "there is fake" in (raised.value.details() or "")
        trailing = {str(key) for key, _ in raised.value.trailing_metadata() or ()}
        assert not any("answered" in key for key in trailing)
    assert between.attempts == {"Translate": 1, "TranslateStream": 1}


@pytest.mark.parametrize("ray", [services_by_model], indirect=True)
async def test_the_deadline_and_the_model_go_along(ray: tuple[InferenceStub, Ray]) -> None:
    stub, between = ray
    await stub.Translate(REQUEST, timeout=60)
    assert between.metadata["multiplexed_model_id"] == "fake"
    assert 30_000 < int(between.metadata["x-beamline-timeout-ms"]) < 61_000  # by two clocks
