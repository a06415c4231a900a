"""A server over a folder of models, with engines that a test holds still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import ServeConfig
from beamline.serving.models.manager import ModelManager, State
from beamline.serving.models.watcher import Watcher
from beamline.serving.server import Server
from tests.serving.doubles import EngineDoubles, connected, started

ANY_PORT = ServeConfig(grpc_port=0, metrics_port=0)


class Running:
    def __init__(self, server: Server, engines: EngineDoubles) -> None:
        self.server = server
        self.engines = engines

    @property
    def manager(self) -> ModelManager:
        assert self.server.manager is not None
        return self.server.manager

    @property
    def lines(self) -> list[tuple[str, str, State]]:
        return [(line.name, line.version, line.state) for line in self.manager.index()]

    def reason(self, name: str, version: str = "") -> str:
        return next(line.reason for line in self.manager.index() if (line.name, line.version) == (name, version))

    async def version(self, name: str = "de", version: str = "") -> str:
        """Which version answers."""
        async with connected(self.server) as stub:
            request = pb.TranslateRequest(model=name, version=version, inputs=[pb.Input(text="hello")])
            return str((await stub.Translate(request)).version)

    async def health(self, service: str) -> str:
        async with grpc.aio.insecure_channel(self.server.grpc_address) as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@asynccontextmanager
async def serving(root: Path, **settings: object) -> AsyncIterator[Running]:
    engines = EngineDoubles()
    config = replace(ANY_PORT, repository=root, **settings)  # type: ignore[arg-type]
    async with started(Server(config, engines.makers)) as server:
        yield Running(server, engines)


async def looked(this: Running, watcher: Watcher) -> None:
    """A change counts at the second look that sees it."""
    await watcher.look()
    await watcher.look()
