"""What became of a call, in terms that belong to no API: a code, and a message where the call failed.

Every exception of ours becomes a `Status` here, and nowhere else. Each API translates the codes into its own: gRPC in
`api/grpc/interceptor.py` (the open inference service among them), HTTP in `api/http/errors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from beamline.serving.errors import (
    Cancelled,
    ComputeError,
    DeadlinePassed,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    Overloaded,
    ShuttingDown,
    SlowReader,
    Unauthenticated,
    Unimplemented,
)

_MAX_MESSAGE = 1000  # characters; gRPC sends the message in a header, and headers are limited


class StatusCode(StrEnum):
    """The names are gRPC's, as clients, logs and the label `code` of the metrics have them."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"  # only of gRPC's own libraries


@dataclass(frozen=True, slots=True)
class Status:
    code: StatusCode
    message: str
    retry_after: float | None = None  # seconds after which the client may try again
    refusal: str | None = None  # the reason under which the call is counted as refused


# The code of each exception, and the reason of its refusal.
_STATUSES: dict[type[Exception], tuple[StatusCode, str | None]] = {
    InvalidRequest: (StatusCode.INVALID_ARGUMENT, "invalid"),
    ModelNotFound: (StatusCode.NOT_FOUND, "model_not_found"),
    ModelUnavailable: (StatusCode.UNAVAILABLE, "model_unavailable"),
    Overloaded: (StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    ShuttingDown: (StatusCode.UNAVAILABLE, "shutting_down"),
    Unimplemented: (StatusCode.UNIMPLEMENTED, "unimplemented"),
    SlowReader: (StatusCode.RESOURCE_EXHAUSTED, "slow_reader"),
    Unauthenticated: (StatusCode.UNAUTHENTICATED, "unauthenticated"),
    Forbidden: (StatusCode.PERMISSION_DENIED, "forbidden"),
    DeadlinePassed: (StatusCode.DEADLINE_EXCEEDED, None),
    Cancelled: (StatusCode.CANCELLED, None),
}


def first_failure(error: Exception) -> Exception:
    """Of concurrent tasks: the one that cancelled the others."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: Exception, request_id: str) -> Status:
    """The status of a call that ended with this exception.

    The message of a `RequestError` is the exception's own. Any other exception is an internal error whose text is not
    shown: the message names the request id, under which the log has it.
    """
    error = first_failure(error)
    for kind, (code, refusal) in _STATUSES.items():
        if isinstance(error, kind):
            return Status(code, str(error)[:_MAX_MESSAGE], getattr(error, "retry_after", None), refusal)
    what = "the model could not compute this request" if isinstance(error, ComputeError) else "internal error"
    return Status(StatusCode.INTERNAL, f"{what} (request id {request_id})")
