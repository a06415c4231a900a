"""The OpenAPI description. That of /v1 is made from the protobuf descriptors: it can't be out of date."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from beamline.serving.api.http.endpoints import ENDPOINTS, TIMEOUT, Endpoint
from beamline.serving.api.http.json_messages import other_words
from beamline.serving.api.http.open_inference import description as open_inference
from beamline.serving.api.http.operating import DESCRIPTIONS
from beamline.serving.api.http.proto_comments import comments
from beamline.serving.config import TextLimits
from beamline.serving.contract.backend import REPORTED
from beamline.serving.contract.call import LOWEST_PRIORITY, MOST_MILLISECONDS, PRIORITY, QUEUE_TIMEOUT, REQUEST_ID
from beamline.serving.text import options
from beamline.version import beamline_version

_F = FieldDescriptor
# As protobuf's JSON has them: 64-bit numbers are strings.
_SCALARS: dict[int, dict[str, Any]] = {
    _F.TYPE_STRING: {"type": "string"},
    _F.TYPE_BYTES: {"type": "string", "format": "byte"},
    _F.TYPE_BOOL: {"type": "boolean"},
    _F.TYPE_FLOAT: {"type": "number", "format": "float"},
    _F.TYPE_DOUBLE: {"type": "number", "format": "double"},
    _F.TYPE_INT32: {"type": "integer", "format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1},
    _F.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    _F.TYPE_INT64: {"type": "string", "format": "int64", "pattern": "^-?[0-9]{1,18}$"},
    _F.TYPE_UINT64: {"type": "string", "format": "uint64", "pattern": "^[0-9]{1,19}$"},
}
_REFUSED = {
    "description": "what was wrong, and what is allowed",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def _between(lowest: float, highest: float) -> dict[str, Any]:
    return {"minimum": lowest, "maximum": highest}


# The bounds that hold for every model; what depends on the model, or on another field, is said by the error's sentence.
_SEARCH: dict[str, dict[str, Any]] = {
    "beam_size": {"minimum": 1},
    "length_penalty": _between(*options.LENGTH_PENALTY),
    "repetition_penalty": _between(*options.REPETITION_PENALTY),
    "suppress_tokens": {"maxItems": options.MAX_SUPPRESSED},
    "time_limit_ms": {"minimum": 1},
    "temperature": _between(0, options.TEMPERATURE[1]),
    "top_k": _between(0, options.TOP_K),
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": _between(0, 1),
    "stop": {
        "maxItems": options.MAX_STOPS,
        "items": {"type": "string", "minLength": 1, "maxLength": options.MAX_STOP_LENGTH},
    },
}
_BOUNDS: dict[str, dict[str, dict[str, Any]]] = {
    "DecodingOptions": {**_SEARCH, "num_hypotheses": {"minimum": 1}, "max_length": {"minimum": options.SHORTEST}},
    "GenerationOptions": {
        **_SEARCH,
        "n": {"minimum": 1},
        "max_tokens": {"minimum": 1},
        "presence_penalty": _between(*options.PENALTY),
        "frequency_penalty": _between(*options.PENALTY),
        "top_log_probs": _between(0, REPORTED),
        "logit_bias": {"maxProperties": options.MAX_BIASED},
    },
    "TokenIds": {"ids": {"minItems": 1}},
}


def openapi(max_inputs: int = TextLimits().max_inputs) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths = {endpoint.path: {"post": _operation(endpoint, schemas)} for endpoint in ENDPOINTS}
    for message in ("TranslateRequest", "ClassifyRequest", "EmbedRequest"):
        schemas[message]["properties"]["inputs"] |= {"type": "array", "minItems": 1, "maxItems": max_inputs}
        schemas[message]["required"] = ["inputs"]
    return {
        "openapi": "3.1.0",
        "info": {"title": "beamline", "version": beamline_version()},
        "paths": {
            **paths,
            "/v1/models": {
                "get": _described(
                    "/v1/models", "get", "The models that are served, with their limits and defaults", "models"
                )
            },
            **{path: {verb: _described(path, verb, text, tag)} for (verb, path), (text, tag) in DESCRIPTIONS.items()},
            **open_inference.paths(),
            "/healthz/live": {
                "get": {
                    "tags": ["health"],
                    "security": [],
                    "responses": {"200": {"description": "the process answers"}},
                }
            },
            "/healthz/ready": {
                "get": {
                    "tags": ["health"],
                    "security": [],
                    "responses": {
                        "200": {"description": "ready"},
                        "503": {"description": "loading, draining, or no model is served"},
                    },
                }
            },
        },
        "components": {
            "schemas": schemas | open_inference.SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(endpoint.unary.response, schemas)}}
    if endpoint.stream is not None:
        events = _schema(endpoint.stream.response, schemas)
        content["text/event-stream"] = {"schema": {"description": "each event's data is", **events}}
    streams = "" if endpoint.stream is None else "With `accept: text/event-stream`, the answer as it comes."
    return {
        "operationId": endpoint.unary.name,
        "tags": ["inference"],
        "summary": endpoint.summary,
        "description": streams,
        "parameters": [_header(name) for name in (REQUEST_ID, PRIORITY, QUEUE_TIMEOUT, TIMEOUT)],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _schema(endpoint.unary.request, schemas), "example": endpoint.example}
            },
        },
        "responses": {"200": {"description": "OK", "content": content}, "default": _REFUSED},
    }


def _described(path: str, verb: str, text: str, tag: str) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    responses = {"200": {"description": "OK"}, "default": _REFUSED}
    operation: dict[str, Any] = {"summary": text, "tags": [tag], "responses": responses}
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if verb == "post":
        empty = {"schema": {"type": "object", "maxProperties": 0}, "example": {}}
        operation["requestBody"] = {"required": True, "content": {"application/json": empty}}
    return operation


def _header(name: str) -> dict[str, Any]:
    schema = {
        REQUEST_ID: {"type": "string"},
        PRIORITY: {"type": "integer", **_between(0, LOWEST_PRIORITY)},
    }.get(name, {"type": "integer", **_between(1, MOST_MILLISECONDS)})
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _schema(kind: type[Message], schemas: dict[str, Any]) -> dict[str, Any]:
    descriptor: Any = kind.DESCRIPTOR
    return _message(descriptor, schemas)


def _message(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if message.name not in schemas:
        schemas[message.name] = {}  # before its fields, which may be of this type
        fields: Iterable[FieldDescriptor] = message.fields
        said, bounds = comments(), _BOUNDS.get(message.name, {})
        asked = message.name in _messages_of_requests()
        properties = {}
        for field in fields:
            schema = {**_field(field, schemas), **bounds.get(field.name, {})}
            comment = said.get(f"{message.name}.{field.name}")
            properties[field.name] = _with_comment(_or_null(schema) if asked else schema, comment)
        schemas[message.name] = _with_comment(
            {"type": "object", "additionalProperties": False, "properties": properties}, said.get(message.name)
        )
    return {"$ref": f"#/components/schemas/{message.name}"}


@cache
def _messages_of_requests() -> frozenset[str]:
    """The names of all messages that a request may hold."""
    waiting, found = [cast(Descriptor, endpoint.unary.request.DESCRIPTOR) for endpoint in ENDPOINTS], set()
    while waiting:
        message = waiting.pop()
        if message.name not in found:
            found.add(message.name)
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
    return frozenset(found)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """In protobuf's JSON, a field that is null is one that was left out."""
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {
        **schema,
        "type": [*kinds, "null"],
        **({"enum": [*schema["enum"], None]} if "enum" in schema else {}),
    }


def _with_comment(schema: dict[str, Any], comment: str | None) -> dict[str, Any]:
    return schema if comment is None else {**schema, "description": comment}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key = kind.fields_by_name["key"]
        names = {"pattern": "^[0-9]{1,9}$"} if key.type != _F.TYPE_STRING else {}
        value = _field(kind.fields_by_name["value"], schemas)
        return {"type": "object", "propertyNames": {"type": "string", **names}, "additionalProperties": value}
    if kind is not None:
        one = _message(kind, schemas)
    elif field.enum_type is not None:
        words = other_words(field.enum_type)
        kind_of_value: Any = ["string", "boolean"] if words else "string"
        one = {"type": kind_of_value, "enum": [*(value.name for value in field.enum_type.values), *words]}
    else:
        one = _SCALARS[field.type]
    return {"type": "array", "items": one} if field.is_repeated else one


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    about = {"type": "object", "properties": {"code": text, "message": text, "request_id": text}}
    return {"type": "object", "properties": {"error": about}}
