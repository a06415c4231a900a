"""What the documents ask of grpcurl, for machines without it: `-plaintext`, `-d`, `-H`, a target and a method, with the
messages learned from the server's reflection. Where grpcurl is installed, the tests use that one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def main() -> None:
    parser = argparse.ArgumentParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", default="{}")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("target")
    parser.add_argument("method")
    given = parser.parse_args()
    service, _, name = given.method.rpartition("/")
    with grpc.insecure_channel(given.target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        if given.method == "list":
            for each in ProtoReflectionDescriptorDatabase(channel).get_services():
                print(each)
            return
        method = pool.FindServiceByName(service).methods_by_name[name]
        request = json_format.Parse(given.d, GetMessageClass(method.input_type)())
        call: grpc.UnaryStreamMultiCallable[Any, Any] = channel.unary_stream(  # reads one answer as well as many
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        headers = [header.partition(":") for header in given.H]
        metadata = tuple((name.strip(), value.strip()) for name, _, value in headers)
        try:
            for answer in call(request, metadata=metadata):
                print(json_format.MessageToJson(answer, ensure_ascii=False))
        except grpc.RpcError as error:
            sys.exit(f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}")


if __name__ == "__main__":
    main()
