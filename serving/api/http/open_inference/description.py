"""What the OpenAPI description says of /v2."""

from __future__ import annotations

from typing import Any

from beamline.serving.api.http.endpoints import TIMEOUT
from beamline.serving.api.http.open_inference.messages import HEADER_LENGTH
from beamline.serving.api.http.open_inference.routes import VERSION

Schema = dict[str, Any]

_TAG = "open inference (KServe v2)"
_TEXT: Schema = {"type": "string"}
_OR_TEXT: Schema = {"type": ["string", "null"]}
_SHAPE: Schema = {"type": "array", "items": {"type": "integer"}}
_PARAMETERS: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
_JSON, _BINARY = "application/json", "application/octet-stream"


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_INPUT = _object(
    {
        "name": {**_TEXT, "description": "text or token_ids"},
        "shape": _SHAPE,
        "datatype": {**_TEXT, "description": "BYTES of text; INT64, INT32 or UINT32 of token_ids"},
        "parameters": {**_PARAMETERS, "description": "binary_data_size: bytes of it that stand behind the JSON"},
        "data": {"type": ["array", "null"], "description": "flat, or nested as the shape is"},
    },
    *("name", "shape", "datatype"),
    additionalProperties=False,
)
_WANTED = _object(
    {"name": _TEXT, "parameters": {**_PARAMETERS, "description": "binary_data: behind the JSON"}},
    "name",
    additionalProperties=False,
)
_OUTPUT = _object(
    {"name": _TEXT, "shape": _SHAPE, "datatype": _TEXT, "parameters": {"type": "object"}, "data": {"type": "array"}},
    *("name", "shape", "datatype"),
)
_TENSOR = _object({"name": _TEXT, "datatype": _TEXT, "shape": _SHAPE}, "name", "datatype", "shape")
_STATE = _object({"name": _TEXT, "version": _TEXT, "state": _TEXT, "reason": _TEXT}, "name", "state")

SCHEMAS: dict[str, Schema] = {
    "InferenceError": _object({"error": _TEXT, "code": _TEXT, "request_id": _TEXT}, "error"),
    "InferenceRequest": _object(
        {
            "id": _OR_TEXT,
            "parameters": {**_PARAMETERS, "description": "options by name; binary_data_output: all behind the JSON"},
            "inputs": _list_of(_INPUT),
            "outputs": {"type": ["array", "null"], "items": _WANTED},
            "model_name": {"description": "not read: the path says it"},
            "model_version": {"description": "not read: the path says it"},
        },
        "inputs",
        additionalProperties=False,
    ),
    "InferenceResponse": _object(
        {"model_name": _TEXT, "model_version": _TEXT, "id": _TEXT, "outputs": _list_of(_OUTPUT)},
        *("model_name", "model_version", "outputs"),
    ),
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": _list_of(_TEXT),
            "platform": _TEXT,
            "inputs": _list_of(_TENSOR),
            "outputs": _list_of(_TENSOR),
        },
        *("name", "versions", "platform", "inputs", "outputs"),
    ),
}
_EXAMPLE = {
    "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Save the file."]}],
    "parameters": {"beam_size": 4},
}
_REFUSED = {
    "description": "what was wrong, and what is allowed",
    "content": {_JSON: {"schema": _reference("InferenceError")}},
}
_CHANGE = _object({"parameters": _PARAMETERS}, additionalProperties=False)
_METADATA = _object({"name": _TEXT, "version": _TEXT, "extensions": _list_of(_TEXT)}, "name", "version", "extensions")
_READY = _object({"name": _TEXT, "ready": {"type": "boolean"}}, "name", "ready")
_STATISTICS = _object({"model_stats": _list_of({"type": "object"})}, "model_stats")

# Of a model: what stands behind its name, the summary, and what is answered.
_OF_MODEL: tuple[tuple[str, str, Schema], ...] = (
    ("", "A model's tensors and versions", _reference("ModelMetadata")),
    ("/ready", "Whether a model can be asked", _READY),
    ("/config", "A model's configuration, limits and defaults, as Triton writes it", {"type": "object"}),
    ("/stats", "How often a model was asked, and what that took", _STATISTICS),
)


def paths() -> dict[str, Any]:
    found: dict[str, Any] = {
        "/v2": {"get": _operation("The server's name, version and extensions", _METADATA)},
        "/v2/health/live": {"get": _health("live")},
        "/v2/health/ready": {"get": _health("ready")},
        "/v2/models/stats": {"get": _operation("The statistics of all models", _STATISTICS)},
    }
    for model, names in (("/v2/models/{name}", ("name",)), ("/v2/models/{name}" + VERSION, ("name", "version"))):
        for rest, summary, answer in _OF_MODEL:
            found[f"{model}{rest}"] = {"get": _operation(summary, answer, *names)}
        found[f"{model}/infer"] = {"post": _infer(*names)}
    ready = _object({"ready": {"type": ["boolean", "null"]}}, additionalProperties=False)
    index = _operation("Every model and version of the repository, with its state and why", _list_of(_STATE))
    found["/v2/repository/index"] = {"post": {**index, "requestBody": _body(ready)}}
    for change in ("load", "unload"):
        operation = _operation(f"{change.capitalize()} a model; needs the scope admin", {"type": "object"}, "name")
        found[f"/v2/repository/models/{{name}}/{change}"] = {"post": {**operation, "requestBody": _body(_CHANGE)}}
    return found


def _operation(summary: str, answer: Schema, *names: str) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    ok = {"description": "OK", "content": {_JSON: {"schema": answer}}}
    return {
        "summary": summary,
        "tags": [_TAG],
        "responses": {"200": ok, "default": _REFUSED},
        **({"parameters": parameters} if parameters else {}),
    }


def _body(schema: Schema) -> dict[str, Any]:
    return {"required": False, "content": {_JSON: {"schema": schema, "example": {}}}}


def _infer(*names: str) -> dict[str, Any]:
    operation = _operation("Ask a model, with tensors as JSON or behind it", _reference("InferenceResponse"), *names)
    raw = {"schema": {"type": "string", "format": "binary"}}
    operation["responses"]["200"]["content"][_BINARY] = raw
    number = {"type": "integer", "minimum": 0}
    operation["parameters"] += [
        {"name": HEADER_LENGTH, "in": "header", "required": False, "schema": number},
        {"name": TIMEOUT, "in": "header", "required": False, "schema": {**number, "minimum": 1}},
    ]
    asked = {"schema": _reference("InferenceRequest"), "example": _EXAMPLE}
    return {**operation, "requestBody": {"required": True, "content": {_JSON: asked, _BINARY: raw}}}


def _health(name: str) -> dict[str, Any]:
    content = {_JSON: {"schema": _object({name: {"type": "boolean"}, "error": _TEXT}, name)}}
    return {
        "tags": ["health"],
        "security": [],
        "responses": {
            "200": {"description": "yes", "content": content},
            "503": {"description": "no", "content": content},
        },
    }
