"""The open inference protocol as a gRPC service: its methods, registered with a server under the public name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.grpc.inference_service import deadline_of, unary
from beamline.serving.api.guard import Guard
from beamline.serving.api.open_inference.methods import SERVICE, OpenInference
from beamline.serving.api.open_inference.streaming import Reply, Stream
from beamline.serving.contract.call import current_call

_OURS = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]

_SHARED_MEMORY = "this server has no shared memory regions; send tensors in the request"
_UNSUPPORTED = {
    **{
        f"{kind}SharedMemory{action}": _SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    "TraceSetting": "tracing is not set over this protocol; see the server's own options",
    "LogSettings": "logging is not set over this protocol; see the server's own options",
}


def add_to(server: Any, methods: OpenInference, guard: Guard | None) -> None:
    """Without a guard, which a proxy has not, streams can't be called."""
    handlers: dict[str, Any] = {}
    for method in _OURS.methods:
        stream = method.client_streaming
        make: Any = grpc.stream_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            _stream(methods.replies, guard) if stream else unary(getattr(methods, method.name)),
            request_deserializer=getattr(oip, method.input_type.name).FromString,
            response_serializer=getattr(oip, method.output_type.name).SerializeToString,
        )
    for name, sentence in _UNSUPPORTED.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(_unimplemented(name, sentence), bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _stream(replies: Callable[..., AsyncGenerator[Reply]], guard: Guard | None) -> Callable[[Any, Any], Any]:
    def error_message(error: Exception) -> str:
        """An error is a response: the call goes on, but the refusal is counted."""
        assert guard is not None
        return guard.failure(error, f"/{SERVICE}/ModelStreamInfer", current_call().request_id).message

    async def respond(requests: AsyncIterator[oip.ModelInferRequest], context: Any) -> None:
        await Stream(lambda request: replies(request, deadline_of(context)), error_message, context).run(requests)

    return respond


def _unimplemented(name: str, sentence: str) -> Any:
    async def refuse(request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented: {sentence}")

    return refuse
