"""Our exceptions as gRPC statuses: here, and nowhere else."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

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
from beamline.serving.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# The status of each error, and the reason under which a refused call is counted.
_STATUSES: dict[type[Exception], tuple[grpc.StatusCode, str | None]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, "invalid"),
    ModelNotFound: (grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ModelUnavailable: (grpc.StatusCode.UNAVAILABLE, "model_unavailable"),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    ShuttingDown: (grpc.StatusCode.UNAVAILABLE, "shutting_down"),
    Unimplemented: (grpc.StatusCode.UNIMPLEMENTED, "unimplemented"),
    SlowReader: (grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_reader"),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"),
    Forbidden: (grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
    DeadlinePassed: (grpc.StatusCode.DEADLINE_EXCEEDED, None),
    Cancelled: (grpc.StatusCode.CANCELLED, None),
}

_MAX_DETAILS = 1000  # characters; details travel in a header, and headers are limited


def is_implemented(behaviour: Callable[..., Any]) -> bool:
    """All of ours are coroutines or asynchronous generators; what is generated for a missing method is neither."""
    return inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    sentence: str
    retry_after: float | None = None  # seconds

    @property
    def retry_milliseconds(self) -> int | None:
        return None if self.retry_after is None else max(1, math.ceil(1000 * self.retry_after))


def status_of(error: Exception, method: str, request_id: str, metrics: Metrics) -> Status:
    """What the caller is told. An error that is not ours shows nothing of itself: the log has it, under the id."""
    while isinstance(error, ExceptionGroup):  # of tasks that worked side by side; the first has ended the others
        error = error.exceptions[0]
    known = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), None)
    if known is not None:
        code, reason = known
        if reason is not None:
            metrics.refused.labels(reason).inc()
        return Status(code, str(error)[:_MAX_DETAILS], getattr(error, "retry_after", None))
    log.error("%s failed (request id %s)", method, request_id, exc_info=error)
    what = "the model could not compute this request" if isinstance(error, ComputeError) else "internal error"
    return Status(grpc.StatusCode.INTERNAL, f"{what} (request id {request_id})")
