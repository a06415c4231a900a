"""`beamline.v1.Inference` for those who speak JSON: the same methods, the same guard, protobuf's own JSON.

    POST /v1/translate                              one JSON answer
    POST /v1/translate, Accept: text/event-stream   as it comes: an event for each message, then `event: end`

Headers are those of the gRPC door (authorization, x-request-id, x-beamline-priority, x-beamline-queue-timeout-ms); a
deadline is `x-beamline-timeout-ms`. An error is `{"error": {"code", "message", "request_id"}}`, with gRPC's code.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from beamline.protos import beamline_pb2 as pb
from beamline.serving.api.grpc.statuses import Status, is_implemented
from beamline.serving.api.guard import Guard, Outcome
from beamline.serving.api.http.bodies import parse
from beamline.serving.contract.call import REQUEST_ID, header_number, with_request_id
from beamline.serving.errors import Unimplemented
from beamline.serving.lifecycle import Lifecycle

TIMEOUT = "x-beamline-timeout-ms"
_MOST_WRITTEN = 16  # messages that wait for a slow reader
_MOST_PATH = 100  # letters of an address that an error repeats
_SMALL = 64 * 1024  # bytes of JSON that are parsed in about a millisecond
Answer = TypeVar("Answer")
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]

_HTTP_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True, slots=True)
class Path:
    """What one address answers with: a method that answers once, and one that streams."""

    path: str
    once: str
    stream: str | None = None

    @property
    def request(self) -> Any:
        return SERVICE.methods_by_name[self.once].input_type


PATHS = (
    Path("/v1/translate", "Translate", "TranslateStream"),
    Path("/v1/generate", "GenerateOnce", "Generate"),
    Path("/v1/score", "Score"),
    Path("/v1/classify", "Classify"),
    Path("/v1/embed", "Embed"),
)


class CallContext:
    """What the methods use of a gRPC context."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self.written: asyncio.Queue[Message] = asyncio.Queue(_MOST_WRITTEN)

    async def write(self, reply: Message) -> None:
        """Waits where the reader is slow."""
        await self.written.put(reply)

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


class TooLarge(Exception):
    pass


class Gateway:
    def __init__(self, servicer: Any, lifecycle: Lifecycle, guard: Guard, max_body_bytes: int) -> None:
        self._servicer = servicer
        self._lifecycle = lifecycle
        self._guard = guard
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route(path.path, self._endpoint(path), methods=["POST"]) for path in PATHS]

    def _endpoint(self, path: Path) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            stream = path.stream is not None and "text/event-stream" in request.headers.get("accept", "")
            method = path.stream if stream and path.stream is not None else path.once
            call = _GatewayCall(self._guard, path, method, request)
            message = await call.admit(self._lifecycle, self._max_body_bytes)
            if isinstance(message, Response):
                return message
            behaviour = getattr(self._servicer, method)
            if not is_implemented(behaviour):
                return await call.fail(Unimplemented(f"{method} is not implemented by this server"))
            return await (call.stream(behaviour, message) if stream else call.once(behaviour, message))

        return answer


class _GatewayCall:
    def __init__(self, guard: Guard, path: Path, method: str, request: Request) -> None:
        self._guard = guard
        self._label = f"POST {path.path}"
        self._method = f"/{SERVICE.full_name}/{method}"
        self._path = path
        self._request = request
        self._headers = with_request_id(request.headers)
        self._around = AsyncExitStack()
        self._outcome = Outcome()
        self._context = CallContext(None)

    async def admit(self, lifecycle: Lifecycle, max_body_bytes: int) -> Message | Response:
        """Credentials and limits before the body is looked at; the message, or the refusal."""
        self._outcome = self._around.enter_context(self._guard.record(self._label, self._headers))
        try:
            client = self._guard.authenticate(self._method, self._headers)
            self._outcome.client = f"token:{client.name}" if client.name is not None else _peer(self._request)
            milliseconds = header_number(self._headers, TIMEOUT, 1, 24 * 3600 * 1000)
            self._context = CallContext(None if milliseconds is None else time.monotonic() + milliseconds / 1000)
            self._around.enter_context(self._guard.admit(self._method, self._headers, self._outcome))
            async with lifecycle.arriving():
                body = await _body(self._request, max_body_bytes)
            kind = GetMessageClass(self._path.request)
            return await asyncio.to_thread(parse, body, kind) if len(body) > _SMALL else parse(body, kind)
        except TooLarge:
            self._guard.count_refusal("too_large")
            sentence = f"the body is larger than {max_body_bytes} bytes, the most that is allowed: send it in several"
            return await self._refuse(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence), 413)
        except Exception as error:
            return await self.fail(error)
        except BaseException:
            await self._give_up()
            raise

    async def once(self, behaviour: Callable[[Any, Any], Any], message: Message) -> Response:
        try:
            answer = await self._awaited(behaviour(message, self._context))
            response = JSONResponse(_plain(answer), headers={REQUEST_ID: self._headers[REQUEST_ID]})
        except Exception as error:
            return await self.fail(error)
        except BaseException:
            await self._give_up()
            raise
        await self._around.aclose()
        return response

    async def stream(self, behaviour: Callable[[Any, Any], Any], message: Message) -> Response:
        """The first message is waited for, so that a call that fails at once has its own HTTP status."""
        replies = _replies(behaviour, message, self._context)
        try:
            first = await self._awaited(_first(replies))
        except Exception as error:
            return await self.fail(error)
        except BaseException:
            await self._give_up()
            raise
        headers = {REQUEST_ID: self._headers[REQUEST_ID], "cache-control": "no-store"}
        return StreamingResponse(self._events(first, replies), media_type="text/event-stream", headers=headers)

    async def _events(self, first: Message | None, replies: AsyncGenerator[Message]) -> AsyncIterator[str]:
        async with self._around, aclosing(replies):
            try:
                if first is not None:
                    yield _event(_plain(first))
                async for reply in replies:
                    yield _event(_plain(reply))
                yield _event({}, "end")
            except (asyncio.CancelledError, GeneratorExit):
                self._outcome.code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                status = self._guard.status_of(error, self._label, self._headers)
                self._outcome.code = status.code
                yield _event(_error(status, self._headers), "error")

    async def _awaited(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Only as long as somebody waits for it: raises `ClientDisconnect`."""
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

    async def _give_up(self) -> None:
        self._outcome.code = grpc.StatusCode.CANCELLED
        await self._around.aclose()

    async def fail(self, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            await self._give_up()
            return Response(status_code=499)  # to nobody
        return await self._refuse(self._guard.status_of(error, self._label, self._headers))

    async def _refuse(self, status: Status, code: int | None = None) -> Response:
        self._outcome.code = status.code
        await self._around.aclose()
        return refusal(status, self._headers, code)


async def _replies(
    behaviour: Callable[[Any, Any], Any], message: Message, context: CallContext
) -> AsyncGenerator[Message]:
    """What a method yields, or writes into its context: gRPC allows both."""
    if inspect.isasyncgenfunction(behaviour):
        async with aclosing(behaviour(message, context)) as yielded:
            async for reply in yielded:
                yield reply
        return
    work = asyncio.ensure_future(behaviour(message, context))
    try:
        while not (work.done() and context.written.empty()):
            reading = asyncio.ensure_future(context.written.get())
            await asyncio.wait([reading, work], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                yield reading.result()
            else:
                reading.cancel()
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])


async def _first(replies: AsyncGenerator[Message]) -> Message | None:
    return await anext(replies, None)


def refusal(status: Status, headers: Mapping[str, str], code: int | None = None) -> Response:
    extra = {REQUEST_ID: headers[REQUEST_ID]}
    if status.retry_after is not None:
        extra["retry-after"] = str(math.ceil(status.retry_after))
    if status.code is grpc.StatusCode.UNAUTHENTICATED:
        extra["www-authenticate"] = "Bearer"
    return JSONResponse(_error(status, headers), code or _HTTP_CODES.get(status.code, 500), headers=extra)


async def no_such_address(request: Request, error: Exception) -> Response:
    """What is at no address, or is asked for in the wrong way, has the shape of all other errors."""
    assert isinstance(error, HTTPException)
    headers, path = with_request_id(request.headers), request.url.path[:_MOST_PATH]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        code, sentence = grpc.StatusCode.UNIMPLEMENTED, f"{path} knows no {request.method}; it knows {allowed}"
    else:
        code, sentence = grpc.StatusCode.NOT_FOUND, f"there is nothing at {path}; /docs says what there is"
    response = refusal(Status(code, sentence), headers, error.status_code)
    response.headers.update(error.headers or {})
    return response


def _error(status: Status, headers: Mapping[str, str]) -> dict[str, Any]:
    about = {"code": status.code.name, "message": status.sentence, "request_id": headers[REQUEST_ID]}
    return {"error": about}


def _peer(request: Request) -> str:
    """An address as gRPC writes it, so that a client has one limit for both doors."""
    host = request.client.host if request.client else "unknown"
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise TooLarge
        parts.append(part)
    return b"".join(parts)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _plain(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def _event(data: dict[str, Any], name: str | None = None) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"
