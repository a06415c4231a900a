"""The parts that requests of all kinds have in common: items, options, and what travels with a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from beamline._calls.operation import Rpc, Settings
from beamline.errors import InvalidItem, InvalidRequest
from beamline.protos import beamline_pb2 as pb
from beamline.types import Features, Input, TokenIds

SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name

LANGUAGES = ("source_language", "target_language")
_LONGEST_TIMEOUT = 1e9  # seconds: thirty years
_CALL_OPTIONS = ("model", "version", "timeout", "priority", "queue_timeout")

Request = TypeVar("Request", bound=ProtobufMessage)
Options = Mapping[str, Any]


def rpc_of(name: str, request: Any, response: Any, service: str = SERVICE) -> Rpc:
    return Rpc(service, name, request.SerializeToString, response.FromString)


def items_of(given: Input | Iterable[Input]) -> tuple[bool, list[Any]]:
    """If it was one item, and the items as messages."""
    if isinstance(given, str | TokenIds | Features):
        return True, [_input(given)]
    items: list[Any] = []
    for index, each in enumerate(listed(given, "text", _INPUTS)):
        try:
            items.append(_input(each))
        except InvalidRequest as error:
            items.append(InvalidItem(f"item {index}: {error}", index))
    return False, items


def listed(given: Any, what: str, kinds: str) -> Iterable[Any]:
    """What was given as a list. Bytes would be a list of numbers, and a mapping one of its keys."""
    if isinstance(given, Iterable) and not isinstance(given, bytes | bytearray | memoryview | Mapping):
        return given
    raise InvalidRequest(f"the {what} is of type {type(given).__name__}; give {kinds}, or a list of them")


_INPUTS = "a string, TokenIds or Features"


def _input(item: Input) -> pb.Input:
    try:
        if isinstance(item, str):
            return pb.Input(text=item)
        if isinstance(item, TokenIds):
            return pb.Input(token_ids=pb.TokenIds(ids=item.ids))
        if isinstance(item, Features):
            return pb.Input(features=_features(item))
    except (TypeError, ValueError) as error:
        raise unsendable(item) from error
    raise InvalidRequest(f"the text is of type {type(item).__name__}; give {_INPUTS}")


def _features(item: Features) -> pb.Features:
    widths = {len(row) for row in item.rows}
    if len(widths) != 1:
        raise InvalidRequest(
            f"the rows of features have lengths {sorted(widths)}; all must have the same, and one exist"
        )
    return pb.Features(
        rows=len(item.rows), columns=widths.pop(), values=[float(value) for row in item.rows for value in row]
    )


def unsendable(item: object) -> InvalidRequest:
    if isinstance(item, str):
        return InvalidRequest("the text has lone surrogates, which no UTF-8 text has")
    if isinstance(item, TokenIds):
        return InvalidRequest("the ids must be whole numbers from 0 to 4294967295")
    return InvalidRequest("the features must be rows of numbers")


def template_of(
    method: str, request: Request, options: Options, fields: Sequence[str], also: Sequence[str] = ()
) -> Request:
    """The request with everything but its items. `also`: options that are set elsewhere."""
    known = {*_CALL_OPTIONS, *fields, *also}
    for name in options:
        if name not in known:
            raise TypeError(
                f"{method}() got an unexpected keyword argument {name!r}; it knows {', '.join(sorted(known))}"
            )
    set_fields(request, ("model", *fields), options)
    version = options.get("version")
    if version is not None:
        set_field(request, "version", str(version) if type(version) is int else version)
    return request


def set_fields(message: Any, names: Iterable[str], options: Options) -> None:
    """Those that are given. None is left out: so whoever wraps a method can pass its own defaults on."""
    for name in names:
        if options.get(name) is not None:
            set_field(message, name, options[name])


_ENUMS: dict[str, dict[Any, int]] = {
    "early_stopping": {
        False: pb.EARLY_STOPPING_FALSE,
        True: pb.EARLY_STOPPING_TRUE,
        "never": pb.EARLY_STOPPING_NEVER,
    },
    "pooling": {
        "last": pb.POOLING_LAST,
        "mean": pb.POOLING_MEAN,
        "max": pb.POOLING_MAX,
        "attention": pb.POOLING_ATTENTION,
    },
}


_AT_LEAST_ONE = ("beam_size", "num_hypotheses", "n", "max_length", "max_tokens")


def set_field(message: Any, name: str, value: Any) -> None:
    try:
        if name in _ENUMS:
            setattr(message, name, _ENUMS[name][value])
        elif name == "logit_bias":
            for token, bias in value.items():
                message.logit_bias[token] = bias
        elif name == "stop" or name == "suppress_tokens":
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"{name} is {value!r:.60}; it must be {_kind(message, name)}") from error


def _kind(message: Any, name: str) -> str:
    """What a field holds, for people."""
    if name in _ENUMS:
        return "one of " + ", ".join(repr(value) for value in _ENUMS[name])
    if name == "logit_bias":
        return "a mapping of token ids to numbers"
    if name == "stop":
        return "a text, or a list of texts"
    if name in _AT_LEAST_ONE:
        return "a whole number from 1 on, as far as the model allows"
    field = message.DESCRIPTOR.fields_by_name[name]
    kind = {
        field.TYPE_UINT32: "a whole number from 0 to 4294967295",
        field.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
        field.TYPE_FLOAT: "a number",
        field.TYPE_BOOL: "True or False",
        field.TYPE_STRING: "a text",
    }[field.type]
    return f"a list of token ids, each {kind}" if name == "suppress_tokens" else kind


def with_items(template: Request, **fields: Sequence[Any]) -> Request:
    request = type(template)()
    request.CopyFrom(template)
    for name, values in fields.items():
        getattr(request, name).extend(values)
    return request


def settings_of(options: Options) -> Settings:
    timeout = options.get("timeout")
    if timeout is not None:
        timeout = checked_timeout(timeout)
    priority, seconds = options.get("priority"), options.get("queue_timeout")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 3):
        raise InvalidRequest(f"priority is {priority!r:.60}; it must be a whole number from 0 (most urgent) to 3")
    if seconds is not None and (not isinstance(seconds, int | float) or not 0 < seconds <= 24 * 3600):
        raise InvalidRequest(f"queue_timeout is {seconds!r:.60}; it must be seconds, more than 0 and at most a day's")
    return Settings(timeout, priority, seconds)


def checked_timeout(timeout: float) -> float:
    """gRPC takes a time that is too far away for one that is over."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InvalidRequest(f"timeout is {timeout!r:.60}; it must be seconds, more than 0, or None for no limit")
    return min(timeout, _LONGEST_TIMEOUT)
