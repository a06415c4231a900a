"""Registers the servicer with a gRPC server under the service's public name."""

from __future__ import annotations

from typing import Any

import grpc

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.servicer import OpenInferenceServicer

SERVICE = "inference.GRPCInferenceService"  # its public name
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


def add_to(server: Any, servicer: OpenInferenceServicer) -> None:
    handlers: dict[str, Any] = {}
    for method in _OURS.methods:
        stream = method.client_streaming
        make: Any = grpc.stream_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=getattr(oip, method.input_type.name).FromString,
            response_serializer=getattr(oip, method.output_type.name).SerializeToString,
        )
    for name, sentence in _UNSUPPORTED.items():
        handlers[name] = grpc.unary_unary_rpc_method_handler(_unimplemented(name, sentence), bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unimplemented(name: str, sentence: str) -> Any:
    async def refuse(request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented: {sentence}")

    return refuse
