"""What every call passes, whichever door it comes through: who is it, may it, is there room, how did it go."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from beamline.serving.api.grpc.statuses import Status, status_of
from beamline.serving.contract.call import REQUEST_ID, Call, call_of, enter
from beamline.serving.security.access import Access, scope_of
from beamline.serving.security.limits import ClientLimit
from beamline.serving.security.tokens import Client
from beamline.serving.telemetry.logs import ACCESS
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.telemetry.tracing import Tracing

log = logging.getLogger(ACCESS)


@dataclass(slots=True)
class Outcome:
    """Set by the door when it knows."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    client: str | None = None
    span: Any = None


class Guard:
    def __init__(self, metrics: Metrics, access: Access, limit: ClientLimit, tracing: Tracing) -> None:
        self._metrics = metrics
        self._access = access
        self._limit = limit
        self._tracing = tracing

    def authenticate(self, method: str, headers: Mapping[str, str]) -> Client:
        """Before anything else of a call is looked at. Raises `Unauthenticated` or `Forbidden`."""
        return self._access.check(scope_of(method), headers.get("authorization"))

    @contextmanager
    def admit(self, method: str, headers: Mapping[str, str], outcome: Outcome) -> Iterator[Call]:
        """Around the work of a call, in a task of its own. Raises what a call is refused with."""
        client = outcome.client or "unknown"
        call = call_of(headers, client, partial(self._tracing.sequences, outcome.span))
        enter(call)
        if scope_of(method) is None:
            yield call
            return
        with self._limit.call(client):
            yield call

    @contextmanager
    def record(self, method: str, headers: Mapping[str, str]) -> Iterator[Outcome]:
        """Around everything, refusals too: counts the call and writes its line into the log."""
        started = time.monotonic()
        outcome = Outcome(span=self._tracing.call(method, headers))
        try:
            yield outcome
        finally:
            self._tracing.finish(outcome.span, outcome.code.name, headers[REQUEST_ID])
            seconds = time.monotonic() - started
            self._metrics.calls.labels(method, outcome.code.name).inc()
            self._metrics.call_seconds.labels(method).observe(seconds)
            _log_call(method, outcome, seconds, headers[REQUEST_ID])

    def count_refusal(self, reason: str) -> None:
        """Where a door refuses by itself, without an error of ours."""
        self._metrics.refused.labels(reason).inc()

    def status_of(self, error: Exception, method: str, headers: Mapping[str, str]) -> Status:
        return status_of(error, method, headers[REQUEST_ID], self._metrics)


def _log_call(method: str, outcome: Outcome, seconds: float, request_id: str) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    milliseconds = round(1000 * seconds, 1)
    fields = {"method": method, "code": outcome.code.name, "milliseconds": milliseconds, "client": outcome.client}
    log.info(
        "%s %s in %s ms",
        method,
        outcome.code.name,
        milliseconds,
        extra={"request_id": request_id, "fields": fields},
    )
