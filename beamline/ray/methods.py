"""The gRPC methods of the application, by path, and by the names that Ray calls on a replica: the last part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from beamline.serving.api.grpc import services
from beamline.serving.api.grpc.health import Health
from beamline.serving.api.guard import Guard
from beamline.serving.api.inference import Inference
from beamline.serving.api.open_inference.methods import OpenInference

# Metadata of a failed call that a replica has answered: any other failure is Ray's own. Clients don't see it.
ANSWERED = "x-beamline-answered"

# Never ends, and would keep the replica that it happened to reach from ending.
_LEFT_OUT = "/grpc.health.v1.Health/Watch"


class Registered:
    """Takes the place of a gRPC server: keeps what is registered with it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}  # by path

    def add_generic_rpc_handlers(self, added: Iterable[Any]) -> None:
        for service in added:  # Ray reads them by the same attribute
            self.handlers |= {path: each for path, each in service._method_handlers.items() if path != _LEFT_OUT}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The same handlers once more, in generated code."""


def handlers(
    inference: Any = Inference,
    open_inference: Any = OpenInference,
    guard: Guard | None = None,
    health: Health | None = None,
) -> dict[str, Any]:
    """By path. Without instances, of which a proxy has none, their behaviours can't be called."""
    registered = Registered()
    services.add_to(registered, inference, open_inference, guard, health or Health())
    return registered.handlers


def paths_by_name(known: Iterable[str]) -> dict[str, str]:
    """Where two services have a method of one name, it is the same method (reflection, under two names)."""
    return {path.rpartition("/")[2]: path for path in known}
