"""All gRPC services, added to a server in one place: a gRPC server of ours, or what routes calls to replicas."""

from __future__ import annotations

from typing import Any

from beamline.serving.api.grpc import inference_service, reflection
from beamline.serving.api.grpc.health import Health
from beamline.serving.api.guard import Guard
from beamline.serving.api.inference import Inference
from beamline.serving.api.open_inference import registration
from beamline.serving.api.open_inference.methods import OpenInference


def add_to(
    server: Any, inference: Inference, open_inference: OpenInference, guard: Guard | None, health: Health
) -> None:
    inference_service.add_to(server, inference)
    registration.add_to(server, open_inference, guard)
    health.add_to(server)
    reflection.add_to(server)
