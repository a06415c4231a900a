"""`beamline.v1`: Translate, TranslateStream and Generate as requests of a load test."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import grpc
import grpc.aio

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.targets.grpc_target import GrpcTarget
from beamline.loadtest.targets.status import OK
from beamline.loadtest.targets.target import Connection, Options, Reply, Request, model_and_version
from beamline.protos import beamline_pb2 as pb

_SERVICE = "/beamline.v1.Inference/"
_BOOLEANS = {"true": True, "false": False}

Call = Any  # a method of a channel, ready to be called


class Method(Protocol):
    def options(self, options: Options) -> Any:
        """As a protobuf message, once for all requests that share them. Raises `LoadTestError` for an unknown one."""
        ...

    def open(self, channel: Any) -> Call: ...

    def message(self, request: Request, options: Any) -> Any: ...

    async def reply(self, call: Any) -> Reply:
        """Reads the answer of a call. May raise `grpc.aio.AioRpcError`."""
        ...


@dataclass(frozen=True)
class Translate:
    def options(self, options: Options) -> pb.DecodingOptions:
        return decoding_options(options)

    def open(self, channel: Any) -> Call:
        return channel.unary_unary(
            f"{_SERVICE}Translate", pb.TranslateRequest.SerializeToString, pb.TranslateResponse.FromString
        )

    def message(self, request: Request, options: pb.DecodingOptions) -> pb.TranslateRequest:
        name, version = model_and_version(request.model)
        return pb.TranslateRequest(model=name, version=version, inputs=[pb.Input(text=request.text)], options=options)

    async def reply(self, call: Any) -> Reply:
        response = await call
        return _of_translation(response.translations[0] if response.translations else pb.Translation())


@dataclass(frozen=True)
class TranslateStream(Translate):
    def open(self, channel: Any) -> Call:
        return channel.unary_stream(
            f"{_SERVICE}TranslateStream", pb.TranslateRequest.SerializeToString, pb.TranslateReply.FromString
        )

    async def reply(self, call: Any) -> Reply:
        times: list[float] = []
        translation = pb.Translation()
        async for reply in call:
            if reply.text:
                times.append(time.monotonic())
            if reply.HasField("translation"):
                translation = reply.translation
        return _of_translation(translation, times)


@dataclass(frozen=True)
class Generate:
    def options(self, options: Options) -> pb.GenerationOptions:
        return _parsed(pb.GenerationOptions, options)  # type: ignore[no-any-return]

    def open(self, channel: Any) -> Call:
        return channel.unary_stream(
            f"{_SERVICE}Generate", pb.GenerateRequest.SerializeToString, pb.GenerateReply.FromString
        )

    def message(self, request: Request, options: pb.GenerationOptions) -> pb.GenerateRequest:
        name, version = model_and_version(request.model)
        return pb.GenerateRequest(model=name, version=version, text=request.text, options=options)

    async def reply(self, call: Any) -> Reply:
        times: list[float] = []
        usage = pb.Usage()
        async for reply in call:
            if reply.text:
                times.append(time.monotonic())
            if reply.HasField("usage"):
                usage = reply.usage
        return Reply(OK, source_tokens=usage.prompt_tokens, target_tokens=usage.generated_tokens, token_times=times)


METHODS: dict[str, Method] = {
    "translate": Translate(),
    "translate-stream": TranslateStream(),
    "generate": Generate(),
}


class BeamlineTarget(GrpcTarget):
    """A server of `beamline.v1`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._method = METHODS[connection.method]
        self._calls = cycle([self._method.open(channel) for channel in self._channels])
        self._options: dict[Options, Any] = {}  # parsed once, not for every request

    async def send(self, request: Request) -> Reply:
        try:
            call = next(self._calls)(self._message(request), timeout=self._connection.deadline, metadata=self._metadata)
            return await self._method.reply(call)
        except grpc.aio.AioRpcError as error:
            return Reply(error.code().value[0], error.details() or "")

    def _message(self, request: Request) -> Any:
        options = self._options.get(request.options)
        if options is None:
            options = self._options[request.options] = self._method.options(request.options)
        return self._method.message(request, options)


def _of_translation(translation: pb.Translation, times: list[float] | None = None) -> Reply:
    timings = translation.timings if translation.HasField("timings") else None
    return Reply(
        OK,
        source_tokens=translation.source_tokens,
        target_tokens=translation.target_tokens,
        server_queue=timings.queue_ms / 1000 if timings is not None else float("nan"),
        token_times=times or (),
    )


def decoding_options(options: Options) -> pb.DecodingOptions:
    return _parsed(pb.DecodingOptions, options)  # type: ignore[no-any-return]


def _parsed(kind: Any, options: Options) -> Any:
    parsed = kind()
    for name, value in options:
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            known = ", ".join(kind.DESCRIPTOR.fields_by_name)
            raise LoadTestError(f"there is no option {name!r}; there is {known}")
        try:
            setattr(parsed, name, _option_value(field, value))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LoadTestError(f"option {name} can't be {value!r}") from None
    return parsed


def _option_value(field: Any, value: str) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_name[value].number
    if field.cpp_type == field.CPPTYPE_BOOL:
        return _BOOLEANS[value]
    if field.cpp_type == field.CPPTYPE_STRING:
        return value
    return float(value) if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE) else int(value)
