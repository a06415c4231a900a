"""The one interceptor, around every method of every service: credentials, limits, statuses, counts.

It also takes over decoding. A message that is no valid protobuf (invalid UTF-8 in a string, most often) would fail
inside grpc, which calls that an internal error of the server; here it is the client's. And nothing is decoded for
a caller who may not call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from beamline.serving.api.grpc.statuses import Status, is_implemented
from beamline.serving.api.guard import Guard, Outcome
from beamline.serving.contract.call import REQUEST_ID, with_request_id
from beamline.serving.errors import InvalidRequest, RequestError, Unimplemented
from beamline.serving.security.tokens import Client

Headers = Mapping[str, str]
Behaviour = Callable[[Any, Any], Any]

# Read by gRPC clients with a retry policy: when to try again.
_PUSHBACK = "grpc-retry-pushback-ms"
_FIRST_WORD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands in for a request that could not be decoded, until there is a context to answer it in."""

    reason: str


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown: nothing to guard, and no name that a stranger made up gets into the metrics
            return None
        method: str = handler_call_details.method
        headers = _headers(handler_call_details.invocation_metadata)
        try:
            client = self._guard.authenticate(method, headers)
        except RequestError as error:
            return self._refusal(method, headers, error, handler.request_streaming)
        return _around(handler, _Answers(self._guard, method, headers, client))

    def _refusal(self, method: str, headers: Headers, error: RequestError, streaming: bool) -> Any:
        async def refuse(requests: Any, context: Any) -> None:
            await _hear_out(context, streaming)
            with self._guard.record(method, headers) as outcome:
                status = self._guard.status_of(error, method, headers)
                outcome.code = status.code
                await _abort(context, status, headers)

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits every method: it decodes no message


class _Answers:
    """One call's behaviour with everything around it."""

    def __init__(self, guard: Guard, method: str, headers: Headers, client: Client) -> None:
        self._guard = guard
        self._method = method
        self._headers = headers
        self._client = client

    def once(self, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            async with self._inside(context):
                return await behaviour(_decoded(request), context)

        return answer

    def stream(self, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._inside(context):
                async for response in behaviour(_decoded(request), context):
                    yield response

        return answer

    @asynccontextmanager
    async def _inside(self, context: Any) -> AsyncIterator[None]:
        guard, method, headers = self._guard, self._method, self._headers
        with guard.record(method, headers) as outcome:
            try:
                outcome.client = _identity(self._client, context)
                with guard.admit(method, headers, outcome) as call:
                    context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
                    yield
            except grpc.aio.AbortError:  # who aborted has said why
                outcome.code = _code(context.code())
                raise
            except (asyncio.CancelledError, GeneratorExit):
                # The caller went away, or its deadline did: grpc has answered already.
                outcome.code = _gone(context)
                raise
            except Exception as error:
                await self._fail(error, context, outcome)

    async def _fail(self, error: Exception, context: Any, outcome: Outcome) -> None:
        status = self._guard.status_of(error, self._method, self._headers)
        outcome.code = status.code
        await _abort(context, status, self._headers)


def _around(handler: Any, answers: _Answers) -> Any:
    """The same kind of handler, with everything around it."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour: Behaviour = getattr(handler, kind)
    if inspect.isasyncgenfunction(behaviour):
        guarded = answers.stream(behaviour)
    elif is_implemented(behaviour):
        guarded = answers.once(behaviour)
    else:
        guarded = answers.once(partial(_unimplemented, streaming=handler.request_streaming))
        kind = "stream_stream"  # as for a refusal
    make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(guarded, _tolerant(handler.request_deserializer), handler.response_serializer)


async def _hear_out(context: Any, streaming: bool) -> None:
    """A stream that is refused while its client still sends its first message looks to some clients (grpc.aio) like an
    internal error. Whoever does not speak at once is not waited for."""
    if streaming:
        with suppress(TimeoutError):
            await asyncio.wait_for(context.read(), _FIRST_WORD_SECONDS)


async def _unimplemented(request: Any, context: Any, streaming: bool) -> None:
    await _hear_out(context, streaming)
    raise Unimplemented("this server does not have that method")


async def _abort(context: Any, status: Status, headers: Headers) -> None:
    trailing = [(REQUEST_ID, headers[REQUEST_ID])]
    if status.retry_milliseconds is not None:
        trailing.append((_PUSHBACK, str(status.retry_milliseconds)))
    await context.abort(status.code, status.sentence, tuple(trailing))


def _identity(client: Client, context: Any) -> str:
    """Whose call it is: by token, by certificate, or by address."""
    if client.name is not None:
        return f"token:{client.name}"
    names = context.auth_context().get("x509_common_name")
    if names:
        return f"certificate:{names[0].decode('utf-8', 'replace')}"
    peer: str = context.peer()
    return peer.rpartition(":")[0] or peer


def _code(code: Any) -> grpc.StatusCode:
    """grpc gives back what it was given: a status, or its number."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)


def _gone(context: Any) -> grpc.StatusCode:
    remaining = context.time_remaining()
    over = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if over else grpc.StatusCode.CANCELLED


def _headers(metadata: Any) -> Headers:
    return with_request_id({key: value for key, value in metadata or () if isinstance(value, str)})


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_explain(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(f"the request can't be decoded: {error}. Text must be UTF-8")

    return decode_or_explain


def _decoded(request: Any) -> Any:
    """The message, or the stream of them, without what could not be decoded."""
    if hasattr(request, "__aiter__"):
        return _each_decoded(request)
    if isinstance(request, Undecodable):
        raise InvalidRequest(request.reason)
    return request


async def _each_decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)
