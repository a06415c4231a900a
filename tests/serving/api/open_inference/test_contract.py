"""The wire is the protocol's, though the generated code has names of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import model_config_pb2, service_pb2

from beamline.protos import open_inference_pb2 as oip
from tests.serving.doubles import EngineDouble, running

SERVICE = "inference.GRPCInferenceService"
THEIRS = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}


def fields(message: Any, path: str = "") -> Iterator[tuple[str, str, int, int, bool]]:
    """Everything that the wire depends on, and the names that JSON does."""
    for field in message.fields:
        yield path + message.name, field.name, field.number, field.type, field.is_repeated
    for nested in message.nested_types:
        yield from fields(nested, f"{path}{message.name}.")


@pytest.mark.parametrize("name", oip.DESCRIPTOR.message_types_by_name)
def test_every_field_is_the_protocols(name: str) -> None:
    ours = set(fields(oip.DESCRIPTOR.message_types_by_name[name]))
    theirs = set(fields(THEIRS[name]))
    assert ours <= theirs
    complete = ("Request", "Parameter", "Contents", "ModelInferResponse", "ModelStreamInferResponse")
    if name.endswith(complete):  # what a client sends must be read completely
        assert ours == theirs


def test_every_value_is_the_protocols() -> None:
    ours = {value.name: value.number for value in oip.DataType.DESCRIPTOR.values}
    assert ours.items() <= {value.name: value.number for value in model_config_pb2.DataType.DESCRIPTOR.values}.items()


def test_both_generated_codes_live_in_one_process_in_either_order() -> None:
    for code in (
        "import beamline.protos.open_inference_pb2, tritonclient.grpc",
        "import tritonclient.grpc, beamline.protos.open_inference_pb2, beamline.serving.api.grpc.server",
    ):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


async def call(channel: Any, name: str, message: bytes) -> None:
    await channel.unary_unary(f"/{SERVICE}/{name}")(message, timeout=60)


async def test_reflection_describes_the_service_under_its_public_name() -> None:
    """As grpcurl asks: the list of services, then the file of one, then calls are made from that alone."""
    async with running(EngineDouble()) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(**question: str) -> Any:
            async def questions() -> Any:
                yield reflection_pb2.ServerReflectionRequest(**question)

            return await anext(aiter(stub.ServerReflectionInfo(questions())))

        listed = await ask(list_services="")
        assert SERVICE in {service.name for service in listed.list_services_response.service}
        pool = descriptor_pool.DescriptorPool()
        for symbol in (SERVICE, "beamline.v1.Inference", "grpc.health.v1.Health"):
            found = await ask(file_containing_symbol=symbol)
            for content in found.file_descriptor_response.file_descriptor_proto:
                pool.Add(descriptor_pb2.FileDescriptorProto.FromString(content))
            assert pool.FindServiceByName(symbol).full_name == symbol
        methods = {method.name: method for method in pool.FindServiceByName(SERVICE).methods}
        assert methods["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
        assert methods["ModelStreamInfer"].client_streaming
        for name, method in methods.items():
            if not method.client_streaming:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, name, b"\xff")
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name  # it is there, and reads


async def test_the_rest_of_tritons_service_is_refused_with_a_sentence() -> None:
    theirs = {method.name for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    ours = {method.name for method in oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert len(theirs - ours) == 8
    async with running(EngineDouble()) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        for name in theirs - ours:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, name, b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (caught.value.details() or "").startswith(f"{name} is not implemented: ")
