"""The methods of `beamline.v1` that can be put under load: what is asked, and what of an answer is kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.record import OK
from beamline.loadtest.reply import Reply
from beamline.loadtest.workload import Item, Options
from beamline.protos import beamline_pb2 as pb

_SERVICE = "/beamline.v1.Inference/"
_BOOLEANS = {"true": True, "false": False}

Call = Any  # a method of a channel, ready to be called


class Method(Protocol):
    def options(self, options: Options) -> Any:
        """As a message, once for all requests that have them. Raises `LoadTestError` for what is not known."""
        ...

    def open(self, channel: Any) -> Call: ...

    def request(self, item: Item, options: Any) -> Any: ...

    async def send(self, call: Any) -> Reply:
        """Reads the answer of a call that was made. May raise `grpc.aio.AioRpcError`."""
        ...


@dataclass(frozen=True)
class Translate:
    def options(self, options: Options) -> pb.DecodingOptions:
        return decoding_options(options)

    def open(self, channel: Any) -> Call:
        return channel.unary_unary(
            f"{_SERVICE}Translate", pb.TranslateRequest.SerializeToString, pb.TranslateResponse.FromString
        )

    def request(self, item: Item, options: pb.DecodingOptions) -> pb.TranslateRequest:
        name, version = model_and_version(item.model)
        return pb.TranslateRequest(model=name, version=version, inputs=[pb.Input(text=item.text)], options=options)

    async def send(self, call: Any) -> Reply:
        response = await call
        return _of_translation(response.translations[0] if response.translations else pb.Translation())


@dataclass(frozen=True)
class TranslateStream(Translate):
    def open(self, channel: Any) -> Call:
        return channel.unary_stream(
            f"{_SERVICE}TranslateStream", pb.TranslateRequest.SerializeToString, pb.TranslateReply.FromString
        )

    async def send(self, call: Any) -> Reply:
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

    def request(self, item: Item, options: pb.GenerationOptions) -> pb.GenerateRequest:
        name, version = model_and_version(item.model)
        return pb.GenerateRequest(model=name, version=version, text=item.text, options=options)

    async def send(self, call: Any) -> Reply:
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


def _of_translation(translation: pb.Translation, times: list[float] | None = None) -> Reply:
    timings = translation.timings if translation.HasField("timings") else None
    return Reply(
        OK,
        source_tokens=translation.source_tokens,
        target_tokens=translation.target_tokens,
        server_queue=timings.queue_ms / 1000 if timings is not None else float("nan"),
        token_times=times or (),
    )


def model_and_version(model: str) -> tuple[str, str]:
    """`en-de/2` is version 2 of `en-de`."""
    name, slash, version = model.rpartition("/")
    return (name, version) if slash and version.isdigit() else (model, "")


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
