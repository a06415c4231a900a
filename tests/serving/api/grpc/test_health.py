from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from beamline.protos import beamline_pb2 as pb
from beamline.serving.api.grpc.health import Health
from beamline.serving.models.manager import Listed, State
from beamline.serving.server import Server
from tests.serving.doubles import WAIT_SECONDS, EngineDouble, connected, eventually, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


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


class ManagerDouble:
    """Of one model, whose name and state change."""

    def __init__(self) -> None:
        self.name, self.state = "m", State.READY
        self.changed: Callable[[], Awaitable[None]]

    def index(self) -> list[Listed]:
        return [Listed(self.name, "1", self.state)]

    async def become(self, state: State) -> None:
        self.state = state
        await self.changed()


class HandlersDouble:
    """Takes the place of a gRPC server to which the service is added."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.watch = handlers["Watch"].unary_stream


class Watching:
    """A watcher, and what it heard. One that is stalled takes nothing."""

    def __init__(self, watch: Any, service: str, stalled: bool = False) -> None:
        self.heard: list[int] = []
        self.writing = asyncio.Event()
        self._stalled = stalled
        self.task = asyncio.ensure_future(watch(health_pb2.HealthCheckRequest(service=service), self))

    async def write(self, response: Any) -> None:
        self.writing.set()
        if self._stalled:
            await asyncio.Event().wait()
        self.heard.append(response.status)

    async def hears(self, *statuses: int) -> None:
        await eventually(lambda: self.heard == list(statuses))

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def watched() -> tuple[Health, ManagerDouble, Any]:
    health, manager, handlers = Health(), ManagerDouble(), HandlersDouble()
    await health.begin(manager)  # type: ignore[arg-type]
    health.add_to(handlers)
    return health, manager, handlers.watch


async def test_watchers_that_read_nothing_hold_up_no_change() -> None:
    health, manager, watch = await watched()
    stalled = [Watching(watch, service, stalled=True) for service in ("", "m", "m", "m/1")]
    for each in stalled:
        await each.writing.wait()
    reader = Watching(watch, "m")
    await reader.hears(SERVING)
    await asyncio.wait_for(manager.become(State.UNAVAILABLE), WAIT_SECONDS)
    await reader.hears(SERVING, NOT_SERVING)
    await asyncio.wait_for(manager.become(State.READY), WAIT_SECONDS)
    await reader.hears(SERVING, NOT_SERVING, SERVING)
    await asyncio.wait_for(health.end(), WAIT_SECONDS)
    await reader.hears(SERVING, NOT_SERVING, SERVING, NOT_SERVING)
    for each in (*stalled, reader):
        await each.leave()


async def test_a_watcher_that_leaves_takes_no_other_with_it() -> None:
    health, manager, watch = await watched()
    first, second = Watching(watch, "m"), Watching(watch, "m")
    await second.hears(SERVING)
    await first.leave()
    third = Watching(watch, "m")
    await third.hears(SERVING)
    await manager.become(State.UNAVAILABLE)
    for each in (second, third):
        await each.hears(SERVING, NOT_SERVING)
    await health.end()
    await manager.become(State.READY)
    late = Watching(watch, "m")
    await late.hears(NOT_SERVING)
    assert (first.heard, second.heard, third.heard) == ([SERVING], [SERVING, NOT_SERVING], [SERVING, NOT_SERVING])
    for each in (second, third, late):
        await each.leave()


async def test_a_watcher_is_told_when_a_model_comes_and_goes() -> None:
    _, manager, watch = await watched()
    watcher = Watching(watch, "later")
    await watcher.hears(UNKNOWN)
    manager.name = "later"
    await manager.become(State.READY)
    await watcher.hears(UNKNOWN, SERVING)
    manager.name = "m"
    await manager.become(State.READY)
    await watcher.hears(UNKNOWN, SERVING, UNKNOWN)
    await watcher.leave()


async def test_a_watcher_hears_over_the_wire_that_the_server_drains() -> None:
    async with running(EngineDouble()) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        heard = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await heard.read()).status == SERVING
        draining = asyncio.ensure_future(server.drain())
        assert (await heard.read()).status == NOT_SERVING
        heard.cancel()
        assert await draining
