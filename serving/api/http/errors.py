"""Statuses as HTTP responses: `{"error": {"code", "message", "request_id"}}` and a status code of HTTP's."""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from beamline.serving.api.status import Status, StatusCode
from beamline.serving.contract.call import REQUEST_ID, with_request_id

_MAX_PATH = 100  # characters of a path that an error repeats

_HTTP_CODES = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


def error_response(status: Status, request_id: str, http_code: int | None = None) -> Response:
    """`http_code` where the status alone does not say it."""
    headers = {REQUEST_ID: request_id}
    if status.retry_after is not None:
        headers["retry-after"] = str(math.ceil(status.retry_after))
    if status.code is StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(status, request_id), http_code or _HTTP_CODES.get(status.code, 500), headers=headers)


def error_body(status: Status, request_id: str) -> dict[str, Any]:
    return {"error": {"code": status.code.name, "message": status.message, "request_id": request_id}}


async def routing_error(request: Request, error: Exception, hint: str = "/docs says what there is") -> Response:
    """For a path that does not exist, or not with this method: Starlette's error in the shape of all others."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:_MAX_PATH]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        status = Status(StatusCode.UNIMPLEMENTED, f"{path} knows no {request.method}; it knows {allowed}")
    else:
        status = Status(StatusCode.NOT_FOUND, f"there is nothing at {path}; {hint}")
    response = error_response(status, with_request_id(request.headers)[REQUEST_ID], error.status_code)
    response.headers.update(error.headers or {})
    return response
