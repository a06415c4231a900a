"""Server reflection, by which grpcurl and others learn messages: under v1's name and under v1alpha's, whose messages
are the same on the wire (the library has v1alpha's alone).

It describes all services by their public names, from a descriptor pool of its own: the messages of the open inference
protocol are generated under a package of ours (see protos/open_inference.proto).
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from beamline.protos import beamline_pb2
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.api.inference import SERVICE
from beamline.serving.api.open_inference import methods as open_inference

V1 = "grpc.reflection.v1.ServerReflection"
_METHOD = "ServerReflectionInfo"


def add_to(server: Any) -> None:
    names = (SERVICE, open_inference.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, V1)
    pool = descriptor_pool.DescriptorPool()
    for module in (beamline_pb2, health_pb2, reflection_pb2):
        _add(pool, module.DESCRIPTOR)
    pool.Add(_renamed(reflection_pb2.DESCRIPTOR, "grpc/reflection/v1/reflection.proto", V1.rpartition(".")[0]))
    package = open_inference.SERVICE.rpartition(".")[0]
    pool.Add(_renamed(oip.DESCRIPTOR, "inference/open_inference.proto", package))
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, reflection.SERVICE_NAME):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {_METHOD: handler}),))


def _add(pool: descriptor_pool.DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.AddSerializedFile(file.serialized_pb)


def _renamed(file: Any, name: str, package: str) -> descriptor_pb2.FileDescriptorProto:
    """The same messages and services in another package."""
    copy = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copy)
    own, public = f".{copy.package}.", f".{package}."
    copy.name, copy.package = name, package
    for message in copy.message_type:
        _rename(message, own, public)
    for service in copy.service:
        for method in service.method:
            method.input_type = method.input_type.replace(own, public, 1)
            method.output_type = method.output_type.replace(own, public, 1)
    return copy


def _rename(message: descriptor_pb2.DescriptorProto, own: str, public: str) -> None:
    for field in message.field:
        if field.type_name.startswith(own):
            field.type_name = field.type_name.replace(own, public, 1)
    for nested in message.nested_type:
        _rename(nested, own, public)
