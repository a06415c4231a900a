"""`grpc.health.v1`: for the server as a whole (the empty name), for each service, and for each model, by its name or
by `name/version`. The server and its services are SERVING while at least one model is. NOT_FOUND is only for
unknown names: a model that failed to load or was unloaded is NOT_SERVING, and so is a version that it had before."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from beamline.serving.api import inference
from beamline.serving.api.open_inference import methods as open_inference
from beamline.serving.models.manager import ModelManager, State

_SERVICES = (health.OVERALL_HEALTH, inference.SERVICE, open_inference.SERVICE)

_Status = health_pb2.HealthCheckResponse


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The library's holds a lock while it writes to a watcher, so whoever reads nothing would hold up every change of a
    status; and when one watcher leaves, the others hear of no change any more. Here no change waits for a watcher: each
    is woken, and tells what is so by then."""

    def __init__(self) -> None:
        self._statuses = {health.OVERALL_HEALTH: _Status.SERVING}
        self._watchers: dict[str, set[asyncio.Event]] = {}  # of services that are watched; clients name others, too
        self._ended = False

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Status(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        service, changed, told = request.service, asyncio.Event(), None
        watchers = self._watchers.setdefault(service, set())
        watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(service, _Status.SERVICE_UNKNOWN)
                if status != told:
                    await context.write(_Status(status=status))
                    told = status
                await changed.wait()
        finally:
            watchers.remove(changed)
            if not watchers:
                del self._watchers[service]

    def set(self, service: str, status: Any) -> None:
        """None: there is no such service any more."""
        if self._ended:
            return
        if status is None:
            self._statuses.pop(service, None)
        else:
            self._statuses[service] = status
        for changed in self._watchers.get(service, ()):
            changed.set()

    def end(self) -> None:
        for service in list(self._statuses):
            self.set(service, _Status.NOT_SERVING)
        self._ended = True


class Health:
    def __init__(self) -> None:
        self._servicer = _Servicer()
        self._models: set[str] = set()

    def add_to(self, server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def begin(self, manager: ModelManager) -> None:
        async def follow() -> None:
            self._follow(manager)

        manager.changed = follow
        await follow()

    async def end(self) -> None:
        """Everything is NOT_SERVING from now on, whatever models change later."""
        self._servicer.end()

    def _follow(self, manager: ModelManager) -> None:
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
                self._servicer.set(name, None)
        self._models = set(ready)
        for name, serving in {**ready, **dict.fromkeys(_SERVICES, anything)}.items():
            self._servicer.set(name, _Status.SERVING if serving else _Status.NOT_SERVING)
