"""One call of the HTTP API: guarded, its body read within limits, counted when it is over, its failure a response.

Headers are those of the gRPC API (authorization, x-request-id, x-beamline-priority, x-beamline-queue-timeout-ms); a
deadline is `x-beamline-timeout-ms`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from beamline.serving.api.guard import CallRecord, Guard
from beamline.serving.api.http.body import SMALL, PendingBody, check_kind
from beamline.serving.api.http.endpoints import TIMEOUT
from beamline.serving.api.http.errors import ErrorBody, error_body, failure_response
from beamline.serving.api.http.stalled import EventStream
from beamline.serving.api.status import StatusCode
from beamline.serving.contract.call import REQUEST_ID, header_number, with_request_id
from beamline.serving.errors import SlowReader
from beamline.serving.lifecycle import Lifecycle
from beamline.serving.text.host_work import TextWorkers, is_large

log = logging.getLogger(__name__)

_MUCH = 2**20  # bytes, of a reply that is not worth measuring
_CLIENT_GONE = 499
_MAX_MILLISECONDS = 24 * 3600 * 1000
T = TypeVar("T")
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What every call passes, and its limits."""

    guard: Guard
    lifecycle: Lifecycle
    workers: TextWorkers
    max_body_bytes: int
    write_seconds: float | None = None  # how long a reader may take nothing


class HttpCall:
    """`admit` first, then `unary` or `stream`."""

    def __init__(
        self, gateway: Gateway, request: Request, label: str, method: str, errors: ErrorBody = error_body
    ) -> None:
        """`method`: its name in gRPC, by which it is allowed; `label`: how it is counted and logged."""
        self._gateway = gateway
        self._guard = gateway.guard
        self._label = label
        self._method = method
        self._request = request
        self._error_body = errors
        self._headers = with_request_id(request.headers)
        self._request_id = self._headers[REQUEST_ID]
        self._guarded = AsyncExitStack()  # left when the response has been made, of a stream when it is over
        self._record = CallRecord()
        self.deadline: float | None = None

    async def admit(self, parse: Callable[[bytes], T], binary: bool = False) -> T | Response:
        """What `parse` makes of the body, or the response that refuses it. Credentials and limits come before the body,
        which a GET has not. `binary`: tensors may stand behind the JSON."""
        self._record = self._guarded.enter_context(self._guard.record(self._label, self._headers))
        self._record.http_code = 200
        try:
            self._record.client = address = address_of(self._request)
            client = self._guard.authenticate(self._method, self._headers, address)
            if client.name is not None:
                self._record.client = f"token:{client.name}"
            sends = self._request.method == "POST"
            if sends:
                check_kind(self._headers, binary)
            milliseconds = header_number(self._headers, TIMEOUT, 1, _MAX_MILLISECONDS)
            self.deadline = None if milliseconds is None else time.monotonic() + milliseconds / 1000
            self._guarded.enter_context(self._guard.admit(self._method, self._headers, self._record))
            return await self._parsed(parse) if sends else parse(b"")
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise

    async def _parsed(self, parse: Callable[[bytes], T]) -> T:
        workers = self._gateway.workers
        async with PendingBody(workers) as body:
            async with self._gateway.lifecycle.arriving():
                content = await body.read(self._request, self._gateway.max_body_bytes)
            return await workers.run(len(content) if len(content) > SMALL else 0, partial(parse, content))

    async def unary(self, work: Coroutine[Any, Any, Answer], write: Callable[[Answer], Response]) -> Response:
        try:
            reply = await self._while_connected(work)
            response = await self._written(reply, write)
            response.headers.update({REQUEST_ID: self._request_id, **self._guard.load_header(self._record)})
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise
        await self._guarded.aclose()
        return response

    async def stream(self, replies: AsyncGenerator[Answer], write: Callable[[Answer], bytes]) -> Response:
        """Awaits the first reply, so that a call that fails at once has its own HTTP status."""
        try:
            first = await self._while_connected(_first(replies))
        except Exception as error:
            return await self._fail(error)
        except BaseException:
            await self._cancelled()
            raise
        headers = {REQUEST_ID: self._request_id, "cache-control": "no-store", **self._guard.load_header(self._record)}
        events = self._events(first, replies, write)
        await anext(events)  # from now on they count how the call ends, also where nobody asks for the next one
        return EventStream(events, self._gateway.write_seconds, headers)

    async def _written(self, reply: Answer, write: Callable[[Answer], T]) -> T:
        """Of a large reply, beside the event loop."""
        return await self._gateway.workers.run(_MUCH if is_large(reply) else 0, partial(write, reply))

    async def _events(
        self, first: Answer | None, replies: AsyncGenerator[Answer], write: Callable[[Answer], bytes]
    ) -> AsyncGenerator[bytes]:
        async with self._guarded, aclosing(replies):
            try:
                yield b""  # to have begun
                if first is not None:
                    yield _event(await self._written(first, write))
                async for reply in replies:
                    yield _event(await self._written(reply, write))
                yield _event(b"{}", "end")
            except (asyncio.CancelledError, GeneratorExit):
                self._record.code = StatusCode.CANCELLED
                raise
            except Exception as error:
                status = self._guard.failure(error, self._label, self._request_id)
                self._record.code = status.code
                if isinstance(error, SlowReader):
                    log.warning("%s: %s (request id %s)", self._label, status.message, self._request_id)
                body = json.dumps(self._error_body(status, self._request_id), ensure_ascii=False)
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
        status, response = failure_response(self._guard, error, self._label, self._request_id, self._error_body)
        response.headers.update(self._guard.load_header(self._record))
        self._record.code, self._record.http_code = status.code, response.status_code
        await self._guarded.aclose()
        return response


async def _first(replies: AsyncGenerator[Answer]) -> Answer | None:
    return await anext(replies, None)


def address_of(request: Request) -> str:
    """The client's address as gRPC writes it, so that a client has one limit for both APIs."""
    host = request.client.host if request.client else "unknown"
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)
