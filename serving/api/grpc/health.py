"""`grpc.health.v1`: for the server as a whole (the empty name), for each service, and for each model, by its name or
by `name/version`. The server and its services are SERVING while at least one model is. NOT_FOUND is only for
unknown names: a model that failed to load or was unloaded is NOT_SERVING, and so is a version that it had before."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from beamline.serving.api import inference
from beamline.serving.api.open_inference import methods as open_inference
from beamline.serving.models.manager import ModelManager, State

_SERVICES = (health.OVERALL_HEALTH, inference.SERVICE, open_inference.SERVICE)

_library: Any = health  # its type stubs lack the asyncio part
_Status = health_pb2.HealthCheckResponse


class _Servicer(_library.aio.HealthServicer):  # type: ignore[misc]
    """The library can't remove a service. One that was removed has the status SERVICE_UNKNOWN, and is answered as
    an unknown one."""

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
        """Everything is NOT_SERVING from now on, whatever models change later."""
        await self._servicer.enter_graceful_shutdown()

    async def _follow(self, manager: ModelManager) -> None:
        ready: dict[str, bool] = {}
        for listed in manager.index():
            serving = listed.state is State.READY
            ready[listed.name] = ready.get(listed.name, False) or serving
            if listed.version:
                ready[f"{listed.name}/{listed.version}"] = serving
        anything = any(ready.values())
        for name in self._models - set(ready):
            if name.partition("/")[0] in ready:
                ready[name] = False
            else:
                await self._servicer.set(name, _Status.SERVICE_UNKNOWN)
        self._models = set(ready)
        for name, serving in {**ready, **dict.fromkeys(_SERVICES, anything)}.items():
            await self._servicer.set(name, _Status.SERVING if serving else _Status.NOT_SERVING)
