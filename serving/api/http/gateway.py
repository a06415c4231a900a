"""`beamline.v1.Inference` for clients that send JSON: the same methods, the same guard, protobuf's own JSON.

    POST /v1/translate                              one JSON response
    POST /v1/translate, Accept: text/event-stream   server-sent events: one for each reply, then `event: end`

Headers are those of the gRPC API (authorization, x-request-id, x-beamline-priority, x-beamline-queue-timeout-ms); a
deadline is `x-beamline-timeout-ms`. Errors have the shape that `errors.py` gives them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from beamline.serving.api.guard import CallRecord, Guard
from beamline.serving.api.http.endpoints import ENDPOINTS, TIMEOUT, Endpoint
from beamline.serving.api.http.errors import error_body, error_response
from beamline.serving.api.http.json_messages import from_json, to_json
from beamline.serving.api.http.stalled import EventStream
from beamline.serving.api.inference import Inference, Method
from beamline.serving.api.status import Status, StatusCode
from beamline.serving.contract.call import REQUEST_ID, header_number, with_request_id
from beamline.serving.errors import SlowReader
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.text.host_work import TextWorkers, is_large

log = logging.getLogger(__name__)

_SMALL = 64 * 1024  # bytes of JSON that are parsed in about a millisecond; more would keep the event loop from others
_MUCH = 2**20  # bytes, of a reply that is not worth measuring
_BODY_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 16 * 1024
_CLIENT_GONE = 499
_MAX_MILLISECONDS = 24 * 3600 * 1000
T = TypeVar("T")


def routes(
    inference: Inference, lifecycle: Lifecycle, guard: Guard, max_body_bytes: int, write_seconds: float | None
) -> list[Route]:
    """`write_seconds`: how long an event may wait for its reader."""

    def handler(endpoint: Endpoint) -> Callable[[Request], Any]:
        return _handler(endpoint, inference, lifecycle, guard, max_body_bytes, write_seconds)

    return [Route(endpoint.path, handler(endpoint), methods=["POST"]) for endpoint in ENDPOINTS]


def _handler(
    endpoint: Endpoint,
    inference: Inference,
    lifecycle: Lifecycle,
    guard: Guard,
    max_body_bytes: int,
    write_seconds: float | None,
) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        streams = "text/event-stream" in request.headers.get("accept", "")
        method = endpoint.stream if streams and endpoint.stream is not None else endpoint.unary
        call = _GatewayCall(guard, endpoint, method, request, inference.workers, write_seconds)
        message = await call.admit(lifecycle, max_body_bytes)
        if isinstance(message, Response):
            return message
        respond = call.stream if method.streams else call.unary
        return await respond(getattr(inference, method.name), message)

    return handle


class _Refused(Exception):
    """With an HTTP status of its own."""

    def __init__(self, sentence: str, http_code: int, code: StatusCode, reason: str) -> None:
        super().__init__(sentence)
        self.status = Status(code, sentence, refusal=reason)
        self.http_code = http_code


class _GatewayCall:
    def __init__(
        self,
        guard: Guard,
        endpoint: Endpoint,
        method: Method,
        request: Request,
        workers: TextWorkers,
        write_seconds: float | None,
    ) -> None:
        self._guard = guard
        self._workers = workers
        self._write_seconds = write_seconds
        self._label = f"POST {endpoint.path}"
        self._method = method
        self._request = request
        self._headers = with_request_id(request.headers)
        self._request_id = self._headers[REQUEST_ID]
        self._guarded = AsyncExitStack()  # left when the response has been made, of a stream when it is over
        self._record = CallRecord()
        self._deadline: float | None = None

    async def admit(self, lifecycle: Lifecycle, max_body_bytes: int) -> Message | Response:
        """The request's message, or the response that refuses it. Credentials and limits come before the body."""
        self._record = self._guarded.enter_context(self._guard.record(self._label, self._headers))
        self._record.http_code = 200
        try:
            self._record.client = address = address_of(self._request)
            client = self._guard.authenticate(self._method.full_name, self._headers, address)
            if client.name is not None:
                self._record.client = f"token:{client.name}"
            _check_origin(self._headers)
            milliseconds = header_number(self._headers, TIMEOUT, 1, _MAX_MILLISECONDS)
            self._deadline = None if milliseconds is None else time.monotonic() + milliseconds / 1000
            self._guarded.enter_context(self._guard.admit(self._method.full_name, self._headers, self._record))
            async with _Body(self._workers) as body:
                async with lifecycle.arriving():
                    content = await body.read(self._request, max_body_bytes)
                size = len(content) if len(content) > _SMALL else 0
                return await self._workers.run(size, partial(from_json, content, self._method.request))
        except _Refused as refused:
            self._guard.count_refusal(refused.status.refusal or "invalid")
            return await self._refuse(refused.status, refused.http_code)
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise

    async def unary(self, method: Callable[..., Any], message: Message) -> Response:
        try:
            reply = await self._while_connected(method(message, self._deadline))
            content = await self._json(reply)
            response = Response(content, headers={REQUEST_ID: self._request_id}, media_type="application/json")
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise
        await self._guarded.aclose()
        return response

    async def stream(self, method: Callable[..., Any], message: Message) -> Response:
        """Awaits the first reply, so that a call that fails at once has its own HTTP status."""
        replies: AsyncGenerator[Message] = method(message, self._deadline)
        try:
            first = await self._while_connected(_first(replies))
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise
        headers = {REQUEST_ID: self._request_id, "cache-control": "no-store"}
        return EventStream(self._events(first, replies), self._write_seconds, headers)

    async def _json(self, reply: Message) -> bytes:
        """Of a large reply, beside the event loop."""
        return await self._workers.run(_MUCH if is_large(reply) else 0, lambda: to_json(reply).encode())

    async def _events(self, first: Message | None, replies: AsyncGenerator[Message]) -> AsyncGenerator[bytes]:
        async with self._guarded, aclosing(replies):
            try:
                if first is not None:
                    yield _event(await self._json(first))
                async for reply in replies:
                    yield _event(await self._json(reply))
                yield _event(b"{}", "end")
            except (asyncio.CancelledError, GeneratorExit):
                self._record.code = StatusCode.CANCELLED
                raise
            except Exception as error:
                status = self._guard.failure(error, self._label, self._request_id)
                self._record.code = status.code
                if isinstance(error, SlowReader):
                    log.warning("%s: %s (request id %s)", self._label, status.message, self._request_id)
                body = json.dumps(error_body(status, self._request_id), ensure_ascii=False)
                yield _event(body.encode(), "error")

    async def _while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Cancels the work and raises `ClientDisconnect` when the client disconnects."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(self._request))
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()

    async def _cancelled(self) -> None:
        self._record.code = StatusCode.CANCELLED
        self._record.http_code = _CLIENT_GONE
        await self._guarded.aclose()

    async def _fail(self, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            await self._cancelled()
            return Response(status_code=_CLIENT_GONE)  # is not sent
        return await self._refuse(self._guard.failure(error, self._label, self._request_id))

    async def _refuse(self, status: Status, http_code: int | None = None) -> Response:
        response = error_response(status, self._request_id, http_code)
        self._record.code, self._record.http_code = status.code, response.status_code
        await self._guarded.aclose()
        return response


async def _first(replies: AsyncGenerator[Message]) -> Message | None:
    return await anext(replies, None)


def address_of(request: Request) -> str:
    """The client's address as gRPC writes it, so that a client has one limit for both APIs."""
    host = request.client.host if request.client else "unknown"
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


def _check_origin(headers: Mapping[str, str]) -> None:
    """Keeps web pages of other servers from using their visitors' access to this one. A browser asks before it sends
    JSON to another server, and is never told that it may; but a form, or what pretends to be one, it sends unasked. So
    that is taken only from what is no browser, as `curl -d` sends it."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return
    by_page = "origin" in headers or headers.get("sec-fetch-site", "none") != "none"
    if by_page or kind not in ("", "application/x-www-form-urlencoded"):
        sentence = f"the content-type is {kind[:40]!r}; it must be application/json"
        raise _Refused(sentence, 415, StatusCode.INVALID_ARGUMENT, "invalid")


class _Body:
    """What has come of a request's body counts among the large requests that are here, until it is parsed."""

    def __init__(self, workers: TextWorkers) -> None:
        self._workers = workers
        self._reserved = 0

    async def __aenter__(self) -> _Body:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._workers.release(self._reserved)

    async def read(self, request: Request, max_bytes: int) -> bytes:
        """Within a limit of bytes, and of time: whoever sends slowly gets more of it for what has come."""
        parts, size = [], 0
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began + _BODY_SECONDS) as limit:
                async for part in request.stream():
                    size += len(part)
                    if size > max_bytes:
                        sentence = (
                            f"the body is larger than {max_bytes} bytes, the most that is allowed: send it in several"
                        )
                        raise _Refused(sentence, 413, StatusCode.RESOURCE_EXHAUSTED, "too_large")
                    if size > _SMALL:
                        self._workers.reserve(size - self._reserved)
                        self._reserved = size
                    parts.append(part)
                    limit.reschedule(began + _BODY_SECONDS + size / _LEAST_BYTES_PER_SECOND)
        except TimeoutError:
            sentence = f"the body did not arrive in time: {size} bytes in {_BODY_SECONDS:g} s and more"
            raise _Refused(sentence, 408, StatusCode.DEADLINE_EXCEEDED, "too_slow") from None
        return b"".join(parts)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)
