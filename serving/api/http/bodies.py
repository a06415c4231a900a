"""A JSON body as a protobuf message, or a sentence that says what is wrong with it, in the caller's own words."""

from __future__ import annotations

import json
import re
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from beamline.serving.errors import InvalidRequest

_MOST_UNKNOWN = 3  # fields that one sentence names
_MOST_LETTERS = 40  # of a name that the caller made up
_FIELD = re.compile(r"Failed to parse (\w+) field: ")  # protobuf's way to say where
_LOADING = re.compile(r"(Failed to load JSON: )+")


def parse(body: bytes, kind: type[Message]) -> Message:
    try:
        text = body.decode("utf-8")
        if not text.lstrip().startswith("{"):  # an empty list would pass for an empty message
            raise ValueError("it must be an object")
        return json_format.Parse(text, kind())
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8; it must be a JSON object in UTF-8") from None
    except json_format.ParseError as error:
        problem = _misfit(text, kind.DESCRIPTOR) or _clean(str(error))
    except (RecursionError, ValueError) as error:
        problem = str(error)
    raise InvalidRequest(f"the body is not a {kind.DESCRIPTOR.name} in JSON: {problem}")


def _misfit(text: str, kind: Any) -> str | None:
    """What does not have the message's shape; None where the fault is another one."""
    try:
        return _misfit_of(json.loads(text), kind, "")
    except (RecursionError, ValueError):
        return None


def _misfit_of(value: Any, kind: Descriptor, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} must be an object"
    fields = {name: field for field in kind.fields for name in (field.name, field.json_name)}
    unknown = [key for key in value if key not in fields]
    if unknown:
        names = ", ".join(repr(key[:_MOST_LETTERS]) for key in unknown[:_MOST_UNKNOWN])
        within = f" in {place}" if place else ""
        return f"there is no field {names}{within}; known are {', '.join(field.name for field in kind.fields)}"
    problems = (_misfit_in(value[key], fields[key], f"{place}.{key}" if place else key) for key in value)
    return next((problem for problem in problems if problem), None)


def _misfit_in(value: Any, field: FieldDescriptor, place: str) -> str | None:
    kind = field.message_type
    if value is None or kind is None or kind.GetOptions().map_entry:
        return None
    if not field.is_repeated:
        return _misfit_of(value, kind, place)
    if not isinstance(value, list):
        return f"{place} must be a list"
    problems = (_misfit_of(each, kind, f"{place}[{index}]") for index, each in enumerate(value))
    return next((problem for problem in problems if problem), None)


def _clean(sentence: str) -> str:
    """Protobuf's own sentence on one line, with the field in front as a path."""
    path = []
    while found := _FIELD.match(sentence):
        path.append(found[1])
        sentence = sentence[found.end() :]
    sentence = _LOADING.sub("", " ".join(sentence.split())).rstrip(".")
    return f"{'.'.join(path)}: {sentence}" if path else sentence
