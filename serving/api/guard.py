"""What every call passes, whichever API it comes by: credentials, the limit per client, counts, the access log.

The guard knows neither gRPC's types nor HTTP's. An API calls it with the method's name and the call's headers (gRPC's
metadata, HTTP's headers):

    with guard.record(method, headers) as record:           # around everything, refusals too
        client = guard.authenticate(method, headers, address)  # before anything else of the call is read
        with guard.admit(method, headers, record) as call:  # around the work
            ...
    status = guard.failure(error, method, request_id)       # where any of it raised
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from beamline.serving.api.status import Status, StatusCode, first_failure, status_of
from beamline.serving.contract.call import REQUEST_ID, Call, call_of, enter
from beamline.serving.errors import RequestError, SlowReader
from beamline.serving.security.access import Access, Client, ClientLimit, scope_of
from beamline.serving.security.attempts import TokenAttempts
from beamline.serving.telemetry.load_report import GRPC_TRAILER, HTTP_HEADER
from beamline.serving.telemetry.logs import ACCESS
from beamline.serving.telemetry.metrics import Metrics
from beamline.serving.telemetry.tracing import Tracing

log = logging.getLogger(__name__)
access_log = logging.getLogger(ACCESS)

# What a balancer should turn away from. Other failures are the caller's.
_OUR_FAULT = (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.INTERNAL)


@dataclass(slots=True)
class CallRecord:
    """What is counted and logged of a call. The API sets the client when it is known, and the code if it isn't OK."""

    code: StatusCode = StatusCode.OK
    client: str | None = None
    model: str | None = None
    http_code: int | None = None  # None: another API's call
    span: Any = None

    def answered_by(self, model: str) -> None:
        self.model = model


class Guard:
    def __init__(
        self, metrics: Metrics, access: Access, limit: ClientLimit, tracing: Tracing, load_reports: bool = False
    ) -> None:
        """`load_reports`: tell callers how busy this server is."""
        self._load_reports = load_reports
        self._metrics = metrics
        self._access = access
        self._limit = limit
        self._tracing = tracing
        self._attempts = TokenAttempts()

    def authenticate(self, method: str, headers: Mapping[str, str], address: str) -> Client:
        """Raises `Unauthenticated`, `Forbidden`, or `Overloaded` where too many wrong tokens came from the address."""
        return self._attempts.settle(self.examine(method, headers), address)

    def examine(self, method: str, headers: Mapping[str, str]) -> Client | RequestError:
        """The first half of `authenticate`, where the address is not known yet: nothing else of a call whose token is
        wrong may be read."""
        try:
            return self._access.check(scope_of(method), headers.get("authorization"))
        except RequestError as error:
            return error

    def settle(self, outcome: Client | RequestError, address: str) -> Client:
        """The second half: whose call it is; a refusal is counted for its address, and raised."""
        return self._attempts.settle(outcome, address)

    @contextmanager
    def admit(self, method: str, headers: Mapping[str, str], record: CallRecord) -> Iterator[Call]:
        """Makes the call the current one of this task, which must be the call's own. Raises `Overloaded` where the
        client has too many calls, and `InvalidRequest` for headers with wrong values."""
        client = record.client or "unknown"
        call = call_of(headers, client, partial(self._tracing.sequences, record.span), record.answered_by)
        enter(call)
        if scope_of(method) is None:
            yield call
            return
        with self._limit.call(client):
            yield call

    @contextmanager
    def record(self, method: str, headers: Mapping[str, str]) -> Iterator[CallRecord]:
        """Counts, traces and logs the call when it is over."""
        started = time.monotonic()
        record = CallRecord(span=self._tracing.call(method, headers))
        try:
            yield record
        finally:
            self._tracing.finish(record.span, record.code.name, headers[REQUEST_ID], record.model, record.http_code)
            seconds = time.monotonic() - started
            self._metrics.calls.labels(method, record.code.name).inc()
            self._metrics.call_seconds.labels(method).observe(seconds)
            if record.model is not None:
                self._metrics.load.call(record.code in _OUR_FAULT)
            _log_call(method, record, seconds, headers[REQUEST_ID])

    def load_trailer(self, record: CallRecord) -> tuple[tuple[str, bytes], ...]:
        """The load report, as metadata that goes out behind a gRPC call; nothing where it is not wanted, nor where the
        call asked no model: a stranger is told nothing."""
        return ((GRPC_TRAILER, self._metrics.load.message()),) if self._reports(record) else ()

    def load_header(self, record: CallRecord) -> dict[str, str]:
        """The same for HTTP."""
        return {HTTP_HEADER: self._metrics.load.text()} if self._reports(record) else {}

    def _reports(self, record: CallRecord) -> bool:
        return self._load_reports and record.model is not None

    def failure(self, error: Exception, method: str, request_id: str) -> Status:
        """The status of a call that failed. Counts a refusal, and logs an error that is the server's own."""
        status = status_of(error, request_id)
        if status.refusal is not None:
            self.count_refusal(status.refusal)
        if status.code is StatusCode.INTERNAL:
            log.error("%s failed (request id %s)", method, request_id, exc_info=first_failure(error))
        return status

    def count_refusal(self, reason: str) -> None:
        """For what an API refuses without an exception of ours."""
        self._metrics.refused.labels(reason).inc()


def slow_reader(seconds: float | None) -> SlowReader:
    return SlowReader(f"nothing was read for {seconds:g} seconds, while more was to be sent: the call was given up")


def _log_call(method: str, record: CallRecord, seconds: float, request_id: str) -> None:
    if not access_log.isEnabledFor(logging.INFO):
        return
    milliseconds = round(1000 * seconds, 1)
    fields = {"method": method, "code": record.code.name, "milliseconds": milliseconds, "client": record.client}
    if record.model is not None:
        fields["model"] = record.model
    access_log.info(
        "%s %s in %s ms",
        method,
        record.code.name,
        milliseconds,
        extra={"request_id": request_id, "fields": fields},
    )
