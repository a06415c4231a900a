"""Our exceptions as gRPC statuses: here, and nowhere else.

The interceptor also takes over decoding. A message that is no valid protobuf (invalid UTF-8 in a string, most
often) would fail inside grpc, which calls that an internal error of the server; here it is the client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from serving.errors import (
    Cancelled,
    ComputeError,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
)
from serving.metrics import Metrics

Behaviour = Callable[[Any, Any], Awaitable[Any]]

log = logging.getLogger(__name__)

# The status of each error, and the reason under which a refused call is counted.
_STATUSES: dict[type[Exception], tuple[grpc.StatusCode, str | None]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, "invalid"),
    ModelNotFound: (grpc.StatusCode.NOT_FOUND, "model_not_found"),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    ShuttingDown: (grpc.StatusCode.UNAVAILABLE, "shutting_down"),
    DeadlinePassed: (grpc.StatusCode.DEADLINE_EXCEEDED, None),
    Cancelled: (grpc.StatusCode.CANCELLED, None),
}

_MAX_DETAILS = 1000  # characters; details travel in a header, and headers are limited


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands in for a request that could not be decoded, until there is a context to answer it in."""

    reason: str


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        # Unknown methods have no handler; those that stream are health's Watch and reflection, not ours.
        if handler is None or handler.unary_unary is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._guarded(handler_call_details.method, handler.unary_unary),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            started = time.monotonic()
            code = grpc.StatusCode.OK
            try:
                if isinstance(request, Undecodable):
                    raise InvalidRequest(request.reason)
                return await behaviour(request, context)
            except grpc.aio.AbortError:  # health answers for itself
                code = context.code()
                raise
            except asyncio.CancelledError:
                # The caller went away, or its deadline did: grpc has answered already.
                remaining = context.time_remaining()
                over = remaining is not None and remaining <= 0
                code = grpc.StatusCode.DEADLINE_EXCEEDED if over else grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                code, sentence = self._status_of(method, error)
                await context.abort(code, sentence[:_MAX_DETAILS])
            finally:
                self._metrics.calls.labels(method, _name(code)).inc()
                self._metrics.call_seconds.labels(method).observe(time.monotonic() - started)

        return answer

    def _status_of(self, method: str, error: Exception) -> tuple[grpc.StatusCode, str]:
        known = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), None)
        if known is not None:
            code, reason = known
            if reason is not None:
                self._metrics.refused.labels(reason).inc()
            return code, str(error)
        request_id = uuid.uuid4().hex[:12]
        log.error("%s failed (request id %s)", method, request_id, exc_info=error)
        what = "the model could not compute this request" if isinstance(error, ComputeError) else "internal error"
        return grpc.StatusCode.INTERNAL, f"{what} (request id {request_id})"


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_explain(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(f"the request can't be decoded: {error}. Text must be UTF-8")

    return decode_or_explain


def _name(code: Any) -> str:
    return code.name if isinstance(code, grpc.StatusCode) else str(code)
