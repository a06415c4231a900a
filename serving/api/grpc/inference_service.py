"""`beamline.v1.Inference` as a gRPC service: the methods of `api/inference.py`, registered with a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc

from beamline.serving.api.inference import METHODS, SERVICE, Inference


def add_to(server: Any, inference: Inference) -> None:
    handlers: dict[str, Any] = {}
    for method in METHODS.values():
        call = getattr(inference, method.name)
        make: Any = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            _stream(call) if method.streams else unary(call),
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def deadline_of(context: Any) -> float | None:
    """The client's deadline on `time.monotonic()`, the engine's clock."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def unary(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    async def respond(request: Any, context: Any) -> Any:
        return await call(request, deadline_of(context))

    return respond


def _stream(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Writes to the context instead of yielding: so a cancelled call is cancelled here, inside the generator's
    `aclosing`, and its slots are free at once."""

    async def respond(request: Any, context: Any) -> None:
        async with aclosing(call(request, deadline_of(context))) as replies:
            async for reply in replies:
                await context.write(reply)

    return respond
