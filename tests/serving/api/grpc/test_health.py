from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from beamline.protos import beamline_pb2 as pb
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, connected, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(server: Server, service: str = "") -> int:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)


@pytest.mark.parametrize("service", ["", "beamline.v1.Inference"])
async def test_serving_and_then_draining(service: str) -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server, connected(server) as stub:
        assert await status(server, service) == SERVING
        inside = asyncio.ensure_future(stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")])))
        await engine.until(lambda: len(engine.submitted) == 1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)  # one turn of the loop, so that the drain has begun
        assert await status(server, service) == NOT_SERVING
        engine.release()
        assert await draining
        assert len((await inside).translations) == 1


async def test_an_unknown_service_is_not_found() -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(server, "nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_knows_the_services() -> None:
    async def questions():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection")

    for version in ("v1", "v1alpha"):
        async with running(EngineDouble()) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
            ask = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            answers = [answer async for answer in ask(questions())]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"beamline.v1.Inference", "grpc.health.v1.Health"} <= names
        assert {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")} <= names
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(file)
            for file in answers[1].file_descriptor_response.file_descriptor_proto
        ]
        assert {file.package for file in files} >= {"grpc.reflection.v1"}
