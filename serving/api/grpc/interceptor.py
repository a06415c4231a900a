"""The one interceptor, around every method of every gRPC service: it passes each call through the guard, and translates
statuses into gRPC's.

It also takes over decoding. A message that is no valid protobuf (invalid UTF-8 in a string, most often) would fail
inside grpc, which calls that an internal error of the server; here it is the client's. And the messages of a client
without sufficient credentials are not decoded at all.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from beamline.serving.api.grpc.late_calls import LateCalls
from beamline.serving.api.grpc.patient_context import PatientContext
from beamline.serving.api.guard import CallRecord, Guard
from beamline.serving.api.status import Status, StatusCode, first_failure
from beamline.serving.contract.call import REQUEST_ID, with_request_id
from beamline.serving.errors import InvalidRequest, RequestError, ShuttingDown, SlowReader, Unimplemented
from beamline.serving.security.access import Client

log = logging.getLogger(__name__)

Headers = Mapping[str, str]
Behaviour = Callable[[Any, Any], Any]
CheckSize = Callable[[int], None]  # raises a `RequestError`

_PUSHBACK = "grpc-retry-pushback-ms"  # read by gRPC clients with a retry policy: when to try again
_FIRST_MESSAGE_SECONDS = 1.0
_STATUS_SECONDS = 1.0  # for the status of a call that nobody reads


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Takes the place of a request that could not be decoded, or should not, until there is a context to abort."""

    error: RequestError


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(
        self, guard: Guard, late_calls: LateCalls, check_size: CheckSize, write_seconds: float | None = None
    ) -> None:
        """`check_size` is asked before a request of so many bytes is decoded. `write_seconds`: how long a message may
        wait for its reader."""
        self._check_size = check_size
        self._guard = guard
        self._late_calls = late_calls
        self._write_seconds = write_seconds

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method; a name that a client made up must not become a label of the metrics
            return None
        method: str = handler_call_details.method
        headers = _headers(handler_call_details.invocation_metadata)
        outcome = self._guard.examine(method, headers)
        if isinstance(outcome, RequestError):
            return self._refusal(method, headers, outcome, handler.request_streaming)
        call = _GuardedCall(self._guard, self._late_calls, method, headers, outcome, self._write_seconds)
        return _guarded(handler, call, self._check_size)

    def _refusal(self, method: str, headers: Headers, outcome: RequestError, streaming: bool) -> Any:
        async def refuse(requests: Any, context: Any) -> None:
            await _await_first_message(context, streaming)
            with self._guard.record(method, headers) as record:
                record.client = _address(context)
                try:
                    self._guard.settle(outcome, record.client)
                except RequestError as error:
                    status = self._guard.failure(error, method, headers[REQUEST_ID])
                    record.code = status.code
                    await _abort(context, status, headers)

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits every method: it decodes no message


class _GuardedCall:
    """Wraps a method's behaviour for one call."""

    def __init__(
        self,
        guard: Guard,
        late_calls: LateCalls,
        method: str,
        headers: Headers,
        client: Client,
        write_seconds: float | None,
    ) -> None:
        self._guard = guard
        self._late_calls = late_calls
        self._write_seconds = write_seconds
        self._method = method
        self._headers = headers
        self._client = client

    def unary(self, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Any) -> Any:
            async with self._around(context):
                return await behaviour(_decoded(request), PatientContext(context, self._write_seconds))

        return guarded

    def stream(self, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._around(context):
                async for response in behaviour(_decoded(request), context):
                    yield response

        return guarded

    @asynccontextmanager
    async def _around(self, context: Any) -> AsyncIterator[None]:
        guard, method, headers = self._guard, self._method, self._headers
        with guard.record(method, headers) as record:
            try:
                record.client = _identity(self._client, context)
                guard.settle(self._client, _address(context))
                with guard.admit(method, headers, record) as call:
                    context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
                    yield
            except grpc.aio.AbortError:  # by a library's servicer: the status has been sent
                record.code = _code_of(context.code())
                raise
            except (asyncio.CancelledError, GeneratorExit):
                # The client is gone, or its deadline has passed: grpc has ended the call already.
                record.code = _code_of_cancelled(context)
                raise
            except Exception as error:
                if isinstance(error, ShuttingDown):
                    await self._late_calls.before_refusal()
                await self._fail(error, context, record)

    async def _fail(self, error: Exception, context: Any, record: CallRecord) -> None:
        status = self._guard.failure(error, self._method, self._headers[REQUEST_ID])
        record.code = status.code
        if not isinstance(first_failure(error), SlowReader):
            return await _abort(context, status, self._headers)
        log.warning("%s: %s (request id %s)", self._method, status.message, self._headers[REQUEST_ID])
        with suppress(TimeoutError):  # whoever reads nothing reads no status either
            async with asyncio.timeout(_STATUS_SECONDS):
                await _abort(context, status, self._headers)


def _guarded(handler: Any, call: _GuardedCall, check_size: CheckSize) -> Any:
    """A handler of the same kind, whose behaviour is guarded."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour: Behaviour = getattr(handler, kind)
    if inspect.isasyncgenfunction(behaviour):
        guarded = call.stream(behaviour)
    elif inspect.iscoroutinefunction(behaviour):
        guarded = call.unary(behaviour)
    else:  # what protoc generates for a method that the servicer lacks
        guarded = call.unary(partial(_unimplemented, streaming=handler.request_streaming))
        kind = "stream_stream"  # as for a refusal
    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    if handler.request_streaming:  # one of many must not end them all
        check_size = _any_size
    return make(guarded, _lenient(handler.request_deserializer, check_size), handler.response_serializer)


async def _await_first_message(context: Any, streaming: bool) -> None:
    """A stream that is refused while its client still sends its first message looks to some clients (grpc.aio) like an
    internal error. So the message is awaited before a refusal, for a limited time."""
    if streaming:
        with suppress(TimeoutError):
            await asyncio.wait_for(context.read(), _FIRST_MESSAGE_SECONDS)


async def _unimplemented(request: Any, context: Any, streaming: bool) -> None:
    await _await_first_message(context, streaming)
    raise Unimplemented("this server does not have that method")


async def _abort(context: Any, status: Status, headers: Headers) -> None:
    trailing = [(REQUEST_ID, headers[REQUEST_ID])]
    if status.retry_after is not None:
        trailing.append((_PUSHBACK, str(max(1, math.ceil(1000 * status.retry_after)))))
    await context.abort(grpc.StatusCode[status.code.name], status.message, tuple(trailing))


def _identity(client: Client, context: Any) -> str:
    """The client's name in logs and limits: by its token, its certificate, or its address."""
    if client.name is not None:
        return f"token:{client.name}"
    names = context.auth_context().get("x509_common_name")
    if names:
        return f"certificate:{names[0].decode('utf-8', 'replace')}"
    return _address(context)


def _address(context: Any) -> str:
    """Without the port, which is another one for each connection."""
    peer: str = context.peer()
    return peer.rpartition(":")[0] or peer


def _code_of(code: Any) -> StatusCode:
    """grpc returns what it was given: a `grpc.StatusCode`, or its number."""
    given = next((known for known in grpc.StatusCode if code in (known, known.value[0])), grpc.StatusCode.UNKNOWN)
    return StatusCode.__members__.get(given.name, StatusCode.UNKNOWN)


def _code_of_cancelled(context: Any) -> StatusCode:
    remaining = context.time_remaining()
    over = remaining is not None and remaining <= 0
    return StatusCode.DEADLINE_EXCEEDED if over else StatusCode.CANCELLED


def _headers(metadata: Any) -> Headers:
    return with_request_id({key: value for key, value in metadata or () if isinstance(value, str)})


def _any_size(size: int) -> None:
    pass


def _lenient(decode: Callable[[bytes], Any], check_size: CheckSize) -> Callable[[bytes], Any]:
    def decode_or_explain(data: bytes) -> Any:
        try:
            check_size(len(data))
            return decode(data)
        except RequestError as error:
            return Undecodable(error)
        except DecodeError as error:
            return Undecodable(InvalidRequest(f"the request can't be decoded: {error}. Text must be UTF-8"))

    return decode_or_explain


def _decoded(request: Any) -> Any:
    """The message, or the stream of them; raises `InvalidRequest` for one that could not be decoded."""
    if hasattr(request, "__aiter__"):
        return _each_decoded(request)
    if isinstance(request, Undecodable):
        raise request.error
    return request


async def _each_decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)
