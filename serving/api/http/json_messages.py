"""Protobuf messages from and to JSON. An error names the wrong field as the client wrote it."""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from beamline.serving.errors import InvalidRequest

_MAX_UNKNOWN = 3  # fields that one message names
_MAX_NAME = 40  # characters of a name that the client made up
_FIELD = re.compile(r"Failed to parse (\w+) field: ")  # how protobuf names the field
_LOADING = re.compile(r"(Failed to load JSON: )+")


def to_dict(message: Message) -> dict[str, Any]:
    """With the names of the fields as beamline.proto has them."""
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def to_json(message: Message) -> str:
    """The items of a list are written one by one: a large message in one go would keep all other threads waiting."""
    rest = type(message)()
    lists: dict[str, list[str]] = {}
    for field, value in message.ListFields():
        if field.is_repeated and field.message_type is not None and not field.message_type.GetOptions().map_entry:
            lists[field.name] = [_dumped(to_dict(each)) for each in value]
        elif field.is_repeated:
            getattr(rest, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(rest, field.name).CopyFrom(value)
        else:
            setattr(rest, field.name, value)
    parts = [f"{_dumped(name)}:{_dumped(value)}" for name, value in to_dict(rest).items()]
    parts += [f"{_dumped(name)}:[{','.join(items)}]" for name, items in lists.items()]
    return f"{{{','.join(parts)}}}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def from_json(body: bytes, kind: type[Message]) -> Message:
    """Raises `InvalidRequest` for what is no such message."""
    try:
        text = body.decode("utf-8")
        if not text.lstrip().startswith("{"):  # an empty list would pass for an empty message
            raise ValueError("it must be an object")
        return json_format.Parse(text, kind())
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8; it must be a JSON object in UTF-8") from None
    except json_format.ParseError as error:
        problem = _shape_error(text, kind.DESCRIPTOR) or _one_line(str(error))
    except (RecursionError, ValueError) as error:
        problem = str(error)
    raise InvalidRequest(f"the body is not a {kind.DESCRIPTOR.name} in JSON: {problem}")


def _shape_error(text: str, kind: Any) -> str | None:
    """What does not have the message's shape; None where the error is another one."""
    try:
        return _error_in_object(json.loads(text), kind, "")
    except (RecursionError, ValueError):
        return None


def _error_in_object(value: Any, kind: Descriptor, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} must be an object"
    fields = {name: field for field in kind.fields for name in (field.name, field.json_name)}
    unknown = [key for key in value if key not in fields]
    if unknown:
        names = ", ".join(repr(key[:_MAX_NAME]) for key in unknown[:_MAX_UNKNOWN])
        within = f" in {place}" if place else ""
        return f"there is no field {names}{within}; known are {', '.join(field.name for field in kind.fields)}"
    problems = (_error_in_field(value[key], fields[key], f"{place}.{key}" if place else key) for key in value)
    return next((problem for problem in problems if problem), None)


def _error_in_field(value: Any, field: FieldDescriptor, place: str) -> str | None:
    kind = field.message_type
    if value is None or kind is None or kind.GetOptions().map_entry:
        return None
    if not field.is_repeated:
        return _error_in_object(value, kind, place)
    if not isinstance(value, list):
        return f"{place} must be a list"
    problems = (_error_in_object(each, kind, f"{place}[{index}]") for index, each in enumerate(value))
    return next((problem for problem in problems if problem), None)


def _one_line(sentence: str) -> str:
    """Protobuf's own sentence on one line, with the field in front as a path."""
    path = []
    while found := _FIELD.match(sentence):
        path.append(found[1])
        sentence = sentence[found.end() :]
    sentence = _LOADING.sub("", " ".join(sentence.split())).rstrip(".")
    return f"{'.'.join(path)}: {sentence}" if path else sentence
