"""The open inference protocol (KServe v2): Triton, KServe servers, and our own endpoint of it.

The text is the model's BYTES input, with the name and shape of the model's metadata and 1 for every dynamic dimension;
decoding options become request parameters.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.targets.grpc_target import GrpcTarget
from beamline.loadtest.targets.status import OK
from beamline.loadtest.targets.target import Connection, Options, Reply, Request, model_and_version
from beamline.protos import open_inference_pb2 as oip

_SERVICE = "/inference.GRPCInferenceService"
_FINAL = "triton_final_response"
_BOOLEANS = {"true": True, "false": False}
_FAILED = grpc.StatusCode.UNKNOWN.value[0]  # what an error inside a stream is counted as: it has no status
_INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


class OpenInferenceTarget(GrpcTarget):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        unary: dict[str, Any] = {"ModelInfer": oip.ModelInferResponse, "ModelMetadata": oip.ModelMetadataResponse}
        calls: list[dict[str, Any]] = [
            {
                name: channel.unary_unary(
                    f"{_SERVICE}/{name}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=response.FromString,
                )
                for name, response in unary.items()
            }
            for channel in self._channels
        ]
        self._describe = calls[0]["ModelMetadata"]
        self._calls = cycle([each["ModelInfer"] for each in calls])
        self._streams = cycle(
            [
                channel.stream_stream(
                    f"{_SERVICE}/ModelStreamInfer",
                    request_serializer=oip.ModelInferRequest.SerializeToString,
                    response_deserializer=oip.ModelStreamInferResponse.FromString,
                )
                for channel in self._channels
            ]
        )
        # Made once for each kind of request; only the text differs.
        self._templates: dict[tuple[str, Options], oip.ModelInferRequest] = {}

    async def send(self, request: Request) -> Reply:
        try:
            template = self._templates.get((request.model, request.options))
            if template is None:
                template = self._templates[request.model, request.options] = await self._template(request)
            message = oip.ModelInferRequest()
            message.CopyFrom(template)
            text = request.text.encode()
            message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
            if self._connection.stream:
                return await self._stream(message)
            await next(self._calls)(message, timeout=self._connection.deadline, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return Reply(error.code().value[0], error.details() or "")
        except LoadTestError as error:
            return Reply(_INVALID, str(error))
        return Reply(OK)

    async def _stream(self, message: oip.ModelInferRequest) -> Reply:
        """One stream for one request. Every response with content counts as a token."""
        call = next(self._streams)(timeout=self._connection.deadline, metadata=self._metadata)
        await call.write(message)
        await call.done_writing()
        times: list[float] = []
        async for response in call:
            if response.error_message:
                call.cancel()
                return Reply(_FAILED, response.error_message, token_times=times)
            if response.infer_response.outputs:
                times.append(time.monotonic())
            parameters = response.infer_response.parameters
            if _FINAL in parameters and parameters[_FINAL].bool_param:
                break
        call.cancel()
        return Reply(OK, token_times=times)

    async def _template(self, request: Request) -> oip.ModelInferRequest:
        name, version = model_and_version(request.model)
        metadata = await self._describe(
            oip.ModelMetadataRequest(name=name, version=version),
            timeout=self._connection.deadline,
            metadata=self._metadata,
        )
        tensor = text_input(metadata, self._connection.input_name)
        message = oip.ModelInferRequest(model_name=name or metadata.name, model_version=version)
        shape = [1 if size < 0 else size for size in tensor.shape]
        if any(size != 1 for size in shape):
            raise LoadTestError(f"input {tensor.name!r} of {metadata.name} has shape {shape}; it must take one text")
        message.inputs.add(name=tensor.name, datatype="BYTES", shape=shape)
        for key, value in request.options:
            _set(message.parameters[key], value)
        return message


def text_input(metadata: Any, wanted: str | None) -> Any:
    """The input that takes the text: the one that was named, or the only BYTES one."""
    found = [tensor for tensor in metadata.inputs if tensor.datatype == "BYTES" and wanted in (None, tensor.name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{tensor.name} ({tensor.datatype})" for tensor in metadata.inputs) or "none"
    what = "several BYTES inputs: name one with --input" if found else "no such BYTES input for a text"
    raise LoadTestError(f"model {metadata.name} has {what}; its inputs are {known}")


def _set(parameter: oip.InferParameter, value: str) -> None:
    """By what the value looks like; the protocol wants a type."""
    if value in _BOOLEANS:
        parameter.bool_param = _BOOLEANS[value]
        return
    for kind, field in ((int, "int64_param"), (float, "double_param")):
        try:
            setattr(parameter, field, kind(value))
            return
        except ValueError:
            continue
    parameter.string_param = value
