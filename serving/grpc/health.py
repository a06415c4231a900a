"""`grpc.health.v1`: for the server as a whole (the empty name) and for our service."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import beamline_pb2 as pb

INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_SERVICES = (health.OVERALL_HEALTH, INFERENCE)


class Health:
    def __init__(self) -> None:
        library: Any = health  # whose stubs don't know of asyncio
        self._servicer = library.aio.HealthServicer()

    def add_to(self, server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if serving else response.NOT_SERVING
        for service in _SERVICES:
            await self._servicer.set(service, status)
