"""Failures as HTTP responses: a status code of HTTP's, and a body in the shape of the API that was called.

/v1 and all else    {"error": {"code", "message", "request_id"}}
/v2                 {"error": MESSAGE, "code", "request_id"}, because clients of the open inference protocol show
                    what stands under `error`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from beamline.serving.api.guard import Guard
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

ErrorBody = Callable[[Status, str], dict[str, Any]]  # of a status and a request id


class Refused(Exception):
    """With an HTTP status of its own, which the status alone does not say."""

    def __init__(self, sentence: str, http_code: int, code: StatusCode, reason: str) -> None:
        super().__init__(sentence)
        self.status = Status(code, sentence, refusal=reason)
        self.http_code = http_code


def error_body(status: Status, request_id: str) -> dict[str, Any]:
    return {"error": {"code": status.code.name, "message": status.message, "request_id": request_id}}


def open_inference_error_body(status: Status, request_id: str) -> dict[str, Any]:
    return {"error": status.message, "code": status.code.name, "request_id": request_id}


def error_body_at(scope: Scope) -> ErrorBody:
    """Of what is called by this path, whether there is something or not."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return open_inference_error_body if path == "/v2" or path.startswith("/v2/") else error_body


def error_response(
    status: Status, request_id: str, http_code: int | None = None, body: ErrorBody = error_body
) -> Response:
    """`http_code` where the status alone does not say it."""
    headers = {REQUEST_ID: request_id}
    if status.retry_after is not None:
        headers["retry-after"] = str(math.ceil(status.retry_after))
    if status.code is StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body(status, request_id), http_code or _HTTP_CODES.get(status.code, 500), headers=headers)


def failure_response(
    guard: Guard, error: Exception, label: str, request_id: str, body: ErrorBody = error_body
) -> tuple[Status, Response]:
    """Of a call that failed; a refusal is counted. Who went away is not sent it."""
    if isinstance(error, ClientDisconnect):
        gone = Status(StatusCode.CANCELLED, "the client went away")
        return gone, error_response(gone, request_id, body=body)
    if isinstance(error, Refused):
        guard.count_refusal(error.status.refusal or "invalid")
        return error.status, error_response(error.status, request_id, error.http_code, body)
    status = guard.failure(error, label, request_id)
    return status, error_response(status, request_id, body=body)


async def routing_error(request: Request, error: Exception, hint: str = "/docs says what there is") -> Response:
    """For a path that does not exist, or not with this method: Starlette's error in the shape of all others."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:_MAX_PATH]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        status = Status(StatusCode.UNIMPLEMENTED, f"{path} knows no {request.method}; it knows {allowed}")
    else:
        status = Status(StatusCode.NOT_FOUND, f"there is nothing at {path}; {hint}")
    request_id = with_request_id(request.headers)[REQUEST_ID]
    response = error_response(status, request_id, error.status_code, error_body_at(request.scope))
    response.headers.update(error.headers or {})
    return response
