"""Registers the servicer with a gRPC server under the service's public name, and describes it for reflection.

The messages are generated under a package of our own (see protos/open_inference.proto). Reflection answers
with the public names, from a descriptor pool of its own.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.open_inference.servicer import OpenInferenceServicer

SERVICE = "inference.GRPCInferenceService"  # its public name
_OURS = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_PUBLIC_PACKAGE = SERVICE.partition(".")[0]

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


def reflection_pool(*others: Any) -> descriptor_pool.DescriptorPool:
    """Descriptors of open_inference.proto under its public package, and of the `others` (modules of generated code) as
    they are."""
    pool = descriptor_pool.DescriptorPool()
    for module in others:
        _add(pool, module.DESCRIPTOR)
    public = descriptor_pb2.FileDescriptorProto()
    oip.DESCRIPTOR.CopyToProto(public)
    own = f".{public.package}."
    public.name, public.package = "inference/open_inference.proto", _PUBLIC_PACKAGE
    for message in public.message_type:
        _rename(message, own)
    for method in public.service[0].method:
        method.input_type = _renamed(method.input_type, own)
        method.output_type = _renamed(method.output_type, own)
    pool.Add(public)
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.AddSerializedFile(file.serialized_pb)


def _rename(message: descriptor_pb2.DescriptorProto, own: str) -> None:
    for field in message.field:
        if field.type_name:
            field.type_name = _renamed(field.type_name, own)
    for nested in message.nested_type:
        _rename(nested, own)


def _renamed(name: str, own: str) -> str:
    return f".{_PUBLIC_PACKAGE}.{name.removeprefix(own)}"
