"""`grpc.health.v1`: for the server as a whole (the empty name), for each service, and for each model, by its name or
by `name/version`. The server and its services are SERVING while at least one model is. NOT_FOUND is only for names that
nobody knows: a model that failed to load or was unloaded is NOT_SERVING, and so is a version that it had before."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from beamline.protos import beamline_pb2 as pb
from beamline.serving.models.manager import ModelManager, State

OPEN_INFERENCE = "inference.GRPCInferenceService"  # as the world knows it
INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_SERVICES = (health.OVERALL_HEALTH, INFERENCE, OPEN_INFERENCE)

_library: Any = health  # whose stubs don't know of asyncio
_Status = health_pb2.HealthCheckResponse


class _Servicer(_library.aio.HealthServicer):  # type: ignore[misc]
    """The library can't forget a service; one that is gone is unknown."""

    async def Check(self, request: Any, context: Any) -> Any:
        answer = await super().Check(request, context)
        if answer.status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return answer


class Health:
    def __init__(self) -> None:
        self._servicer = _Servicer()
        self._models: set[str] = set()

    def add_to(self, server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def begin(self, manager: ModelManager) -> None:
        async def follow() -> None:
            await self._follow(manager)

        manager.changed = follow
        await follow()

    async def end(self) -> None:
        """Nothing is served from now on, whatever is said later."""
        await self._servicer.enter_graceful_shutdown()

    async def _follow(self, manager: ModelManager) -> None:
        ready: dict[str, bool] = {}
        for line in manager.index():
            serving = line.state is State.READY
            ready[line.name] = ready.get(line.name, False) or serving
            if line.version:
                ready[f"{line.name}/{line.version}"] = serving
        anything = any(ready.values())
        for name in self._models - set(ready):
            if name.partition("/")[0] in ready:
                ready[name] = False
            else:
                await self._servicer.set(name, _Status.SERVICE_UNKNOWN)
        self._models = set(ready)
        for name, serving in {**ready, **dict.fromkeys(_SERVICES, anything)}.items():
            await self._servicer.set(name, _Status.SERVING if serving else _Status.NOT_SERVING)
