"""Protobuf messages from and to JSON. An error names the wrong field as the client wrote it."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from beamline.serving.errors import InvalidRequest

_MAX_UNKNOWN = 3  # fields that one message names
_MAX_NAME = 40  # characters of a name that the client made up
_FIELD = re.compile(r"Failed to parse (\w+) field: ")  # how protobuf names the field
_TOO_DEEP = "it is nested too deeply"
_FLOAT32_END = 3.4028236e38


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
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object)
        if not isinstance(value, dict):  # an empty list would pass for an empty message
            raise ValueError("it must be an object, { ... }")
        descriptor: Any = kind.DESCRIPTOR
        problem = _error_in_enums(value, descriptor, "")
        if problem is None:
            return _parsed(value, kind)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8; it must be a JSON object in UTF-8") from None
    except RecursionError:
        problem = _TOO_DEEP
    except ValueError as error:
        problem = str(error)
        if problem.startswith("Exceeds the limit"):  # Python's advice to itself, not to a client
            problem = "it has a number of too many digits"
    raise InvalidRequest(f"the body is not a {kind.DESCRIPTOR.name} in JSON: {problem}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name[:_MAX_NAME]!r} twice in one object")
        found[name] = value
    return found


def _parsed(value: dict[str, Any], kind: type[Message]) -> Message:
    """Raises ValueError for what is not of the message's shape."""
    descriptor: Any = kind.DESCRIPTOR
    try:
        return json_format.ParseDict(value, kind())
    except Exception as error:  # protobuf lets through what Python raises: for a number too large, an OverflowError
        problem = _error_in_object(value, descriptor, "") or _one_line(str(error))
    raise ValueError(problem)


def other_words(kind: EnumDescriptor) -> tuple[bool | str, ...]:
    """What a client may write for an enumeration's names: Hugging Face's words, as the other APIs take them."""
    return (True, False, "never") if kind.full_name == "beamline.v1.EarlyStopping" else ()


@cache
def _enums_below(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """The fields that are enumerations or have some in them. Lists, which may be long, are not looked through: none in
    a request has any."""
    fields = [field for field in kind.fields if not field.is_repeated]
    return tuple(
        field
        for field in fields
        if field.enum_type is not None or (field.message_type is not None and _enums_below(field.message_type))
    )


def _error_in_enums(value: Any, kind: Descriptor, place: str) -> str | None:
    """Protobuf would take true for the number 1, which is EARLY_STOPPING_FALSE. The other words become names here."""
    if not isinstance(value, dict):
        return None
    for field in _enums_below(kind):
        for key in value.keys() & {field.name, field.json_name}:
            given, where = value[key], f"{place}.{key}" if place else key
            problem: str | None = None
            if field.message_type is not None:
                problem = _error_in_enums(given, field.message_type, where)
            elif field.enum_type is not None:
                problem = _error_in_field(given, field, where)
                if isinstance(given, bool | str) and given in other_words(field.enum_type):
                    value[key] = f"EARLY_STOPPING_{given}".upper()
            if problem:
                return problem
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
    for oneof in kind.oneofs:
        given = [key for key in value if fields[key].containing_oneof is oneof and value[key] is not None]
        if len(given) > 1:
            return f"{place or 'it'} has {' and '.join(given)}: give one of them"
    problems = (_error_in_field(value[key], fields[key], f"{place}.{key}" if place else key) for key in value)
    return next((problem for problem in problems if problem), None)


def _error_in_field(value: Any, field: FieldDescriptor, place: str) -> str | None:
    if value is None:
        return None
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return _error_in_map(value, kind, place)
    if not field.is_repeated:
        return _error_in_one(value, field, place)
    if not isinstance(value, list):
        return f"{place} must be a list"
    problems = (_error_in_one(each, field, f"{place}[{index}]") for index, each in enumerate(value))
    return next((problem for problem in problems if problem), None)


def _error_in_one(value: Any, field: FieldDescriptor, place: str) -> str | None:
    if field.message_type is not None:
        return _error_in_object(value, field.message_type, place)
    allowed = _allowed_instead(value, field)
    return None if allowed is None else f"{place} is {json.dumps(value)[:_MAX_NAME]}; it must be {allowed}"


def _error_in_map(value: Any, kind: Descriptor, place: str) -> str | None:
    if not isinstance(value, dict):
        return f"{place} must be an object"
    key, item = kind.fields_by_name["key"], kind.fields_by_name["value"]
    for name, each in value.items():
        if allowed := _allowed_instead(name, key):
            return f"{place} has the key {name[:_MAX_NAME]!r}; keys must be {allowed}"
        if problem := _error_in_one(each, item, f"{place}[{name}]"):
            return problem
    return None


_F = FieldDescriptor
_WHOLE = {
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_INT64: (-(2**63), 2**63 - 1),
    _F.TYPE_UINT64: (0, 2**64 - 1),
}


def _allowed_instead(value: Any, field: FieldDescriptor) -> str | None:
    """What the value must be; None where it is that. Protobuf takes numbers as text, too."""
    if field.type == _F.TYPE_STRING:
        whole_text = isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
        return None if whole_text else "text, in quotes, of whole characters"
    if field.type == _F.TYPE_BOOL:
        return None if isinstance(value, bool) else "true or false"
    if field.enum_type is not None:
        names, words = [known.name for known in field.enum_type.values], other_words(field.enum_type)
        if value in names or (isinstance(value, bool | str) and value in words):
            return None
        return None if _is_whole(value, _F.TYPE_INT32) else f"one of {', '.join([*names, *map(json.dumps, words)])}"
    if field.type == _F.TYPE_BYTES:
        return None if isinstance(value, str) else "base64, in quotes"
    if field.type in _WHOLE:
        lowest, highest = _WHOLE[field.type]
        return None if _is_whole(value, field.type) else f"a whole number from {lowest} to {highest}"
    number = _number(value)
    return None if number is not None and abs(number) < _FLOAT32_END else "a number that single precision holds"


def _is_whole(value: Any, kind: int) -> bool:
    lowest, highest = _WHOLE[kind]
    number = _number(value)
    return number is not None and number == number // 1 and lowest <= number <= highest


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        whole = isinstance(value, int) or (isinstance(value, str) and value.strip("+-").isdigit())
        return int(value) if whole else float(value)  # a float holds no whole number of more than 309 digits
    except ValueError:
        return None


def _one_line(sentence: str) -> str:
    """Protobuf's own sentence on one line, with the field in front as a path."""
    if "recursion" in sentence:
        return _TOO_DEEP
    path = []
    while found := _FIELD.match(sentence):
        path.append(found[1])
        sentence = sentence[found.end() :]
    sentence = " ".join(sentence.split()).rstrip(".")
    return f"{'.'.join(path)}: {sentence}" if path else sentence
