"""One replica: the engine and all that a server has but for its ports, in a process that Ray started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from beamline.ray import metrics, on_demand, scaling
from beamline.ray.calls import Calls
from beamline.ray.config import Application
from beamline.ray.methods import handlers, paths_by_name
from beamline.serving.api.grpc.health import Health
from beamline.serving.api.grpc.interceptor import GuardInterceptor
from beamline.serving.api.grpc.late_calls import LateCalls
from beamline.serving.errors import BeamlineError
from beamline.serving.service import Service

_CHANGES = ("/load", "/unload")  # of models: a call would reach one replica of many


@serve.deployment(name="Metrics", num_replicas=1, ray_actor_options={"num_cpus": 0})
class MetricsPage:
    def __init__(self) -> None:
        self._page = metrics.Page()

    async def report(self, replica: str, exposition: str) -> None:
        self._page.report(replica, exposition)

    async def text(self) -> str:
        return self._page.text()


class Replica:
    """Ray awaits the constructor before it sends calls, and `__del__` when the last of them is over."""

    async def __init__(self, application: Application, page: Any) -> None:  # type: ignore[misc]
        config = application.config
        config = replace(config, threads=config.threads or _cores())
        self._page = page
        self._service = service = Service(config)
        service.start_engines()
        self._manager = manager = await service.load_models()
        self._ensure = self._loading(application.models_per_replica) if config.on_demand else on_demand.anything
        service.inference = on_demand.OnDemand(service.inference, self._ensure)  # type: ignore[assignment]
        parts = (service.models, service.managing, service.lifecycle, service.workers)
        service.open_inference = on_demand.ReplicaOpenInference(self._ensure, *parts)
        health = Health()
        await health.begin(manager)
        interceptor = GuardInterceptor(service.guard, LateCalls(), service.workers.check, config.write_seconds)
        known = handlers(service.inference, service.open_inference, service.guard, health)
        self._calls = Calls(known, interceptor)
        service.watch()
        self._reporting = asyncio.create_task(self._report())

    def __serve_build_asgi_app__(self) -> Any:
        routes = [each for each in self._service.operating_routes() if not each.path.endswith(_CHANGES)]
        return self._service.gateway_app([Route("/metrics", self._show_metrics), *routes])

    def check_health(self) -> None:
        """Ray replaces a replica that raises here."""
        if self._service.failed.is_set():
            raise BeamlineError("an engine of this replica failed")

    def record_autoscaling_stats(self) -> dict[str, float]:
        load = self._service.metrics.load
        return {scaling.UTILIZATION: load.utilisation(), scaling.SLOTS: float(load.slots())}

    async def __del__(self) -> None:
        self._reporting.cancel()
        with suppress(Exception):
            await self._page.report.remote(self._name(), self._exposition())
        await self._service.stop()

    def _loading(self, most: int) -> on_demand.Ensure:
        manager, default = self._manager, self._service.config.default_model

        async def load_model(model_id: str) -> on_demand.LoadedModel:
            await manager.load(model_id)
            return on_demand.LoadedModel(partial(manager.unload, model_id))

        self._multiplexed = serve.multiplexed(load_model, max_num_models_per_replica=most)  # where Ray looks for it

        async def ensure(name: str) -> None:
            known = manager.known
            name = name or default or (next(iter(known)) if len(known) == 1 else "")
            if name in known:  # an unknown one must not push another out
                await self._multiplexed(name)

        return ensure

    async def _report(self) -> None:
        while True:
            with suppress(Exception):  # the page's own replica may be starting anew
                await self._page.report.remote(self._name(), self._exposition())
            await asyncio.sleep(metrics.REPORT_SECONDS)

    async def _show_metrics(self, request: Request) -> Response:
        return Response(await self._page.text.remote(), headers={"content-type": metrics.CONTENT_TYPE})

    def _exposition(self) -> str:
        return self._service.metrics.exposition().decode()

    @staticmethod
    def _name() -> str:
        return str(serve.get_replica_context().replica_id.unique_id)


def _cores() -> int:
    """That Ray gives this replica (`num_cpus`); several replicas on a machine must not each take all of its cores."""
    given = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    return max(1, int(given))


def _unary(name: str) -> Callable[..., Any]:
    async def call(self: Replica, request: bytes, grpc_context: Any) -> Any:
        return await self._calls.unary(name, request, grpc_context)

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def call(self: Replica, request: Any, grpc_context: Any) -> AsyncGenerator[Any]:
        async for message in self._calls.stream(name, request, grpc_context):
            yield message

    return call


# Ray calls a method of the replica by the name that it has in gRPC.
_HANDLERS = handlers()
for _name, _path in paths_by_name(_HANDLERS).items():
    setattr(Replica, _name, (_stream if _HANDLERS[_path].response_streaming else _unary)(_name))

Models = serve.deployment(name="Models")(serve.ingress()(Replica))
