"""The gateway's OpenAPI description, made from the protobuf descriptors: it can't be out of date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from beamline.serving.api.http.endpoints import ENDPOINTS, TIMEOUT, Endpoint
from beamline.serving.contract.call import PRIORITY, QUEUE_TIMEOUT, REQUEST_ID
from beamline.version import beamline_version

_F = FieldDescriptor
# As protobuf's JSON has them: 64-bit numbers are strings.
_SCALARS: dict[int, dict[str, Any]] = {
    _F.TYPE_STRING: {"type": "string"},
    _F.TYPE_BYTES: {"type": "string", "format": "byte"},
    _F.TYPE_BOOL: {"type": "boolean"},
    _F.TYPE_FLOAT: {"type": "number", "format": "float"},
    _F.TYPE_DOUBLE: {"type": "number", "format": "double"},
    _F.TYPE_INT32: {"type": "integer", "format": "int32"},
    _F.TYPE_UINT32: {"type": "integer", "minimum": 0},
    _F.TYPE_INT64: {"type": "string", "format": "int64"},
    _F.TYPE_UINT64: {"type": "string", "format": "uint64"},
}


def openapi() -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths = {endpoint.path: {"post": _operation(endpoint, schemas)} for endpoint in ENDPOINTS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "beamline", "version": beamline_version()},
        "paths": {
            **paths,
            "/v1/models": {
                "get": {"summary": "The models that are served", "responses": {"200": {"description": "OK"}}}
            },
            "/healthz/live": {"get": {"security": [], "responses": {"200": {"description": "the process answers"}}}},
            "/healthz/ready": {
                "get": {
                    "security": [],
                    "responses": {
                        "200": {"description": "ready"},
                        "503": {"description": "loading, draining, or no model is served"},
                    },
                }
            },
        },
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(endpoint.unary.response, schemas)}}
    if endpoint.stream is not None:
        events = _schema(endpoint.stream.response, schemas)
        content["text/event-stream"] = {"schema": {"description": "each event's data is", **events}}
    return {
        "operationId": endpoint.unary.name,
        "parameters": [_header(name) for name in (REQUEST_ID, PRIORITY, QUEUE_TIMEOUT, TIMEOUT)],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _schema(endpoint.unary.request, schemas)}},
        },
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {
                "description": "what was wrong, and what is allowed",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }


def _header(name: str) -> dict[str, Any]:
    schema = {"type": "string" if name == REQUEST_ID else "integer"}
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _schema(kind: type[Message], schemas: dict[str, Any]) -> dict[str, Any]:
    descriptor: Any = kind.DESCRIPTOR
    return _message(descriptor, schemas)


def _message(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if message.name not in schemas:
        schemas[message.name] = {}  # before its fields, which may be of this type
        fields: Iterable[FieldDescriptor] = message.fields
        properties = {field.name: _field(field, schemas) for field in fields}
        schemas[message.name] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"$ref": f"#/components/schemas/{message.name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field(kind.fields_by_name["value"], schemas)}
    if kind is not None:
        one = _message(kind, schemas)
    elif field.enum_type is not None:
        one = {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    else:
        one = _SCALARS[field.type]
    return {"type": "array", "items": one} if field.is_repeated else one


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    about = {"type": "object", "properties": {"code": text, "message": text, "request_id": text}}
    return {"type": "object", "properties": {"error": about}}
