"""gRPC calls as a replica gets them from Ray: raw bytes and a context that was sent along.

They pass the same interceptor and the same servicers as in a server of our own. A failed call is answered, not raised:
an exception would lose the call's metadata on its way through Ray, and be logged by it as an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc

from beamline.ray.methods import ANSWERED, paths_by_name
from beamline.serving.api.grpc.interceptor import GuardInterceptor
from beamline.serving.api.http.endpoints import TIMEOUT

_END = object()


class Nothing:
    """The message of a call that has none, in the form that Ray sends on."""

    def SerializeToString(self) -> bytes:
        return b""


class Calls:
    def __init__(self, handlers: Mapping[str, Any], interceptor: GuardInterceptor) -> None:
        self._handlers = handlers
        self._paths = paths_by_name(handlers)
        self._interceptor = interceptor

    async def unary(self, name: str, request: bytes, sent: Any) -> Any:
        handler = await self._guarded(name, sent)
        context = ReplicaContext(sent)
        behaviour = handler.stream_stream or handler.unary_unary  # the former is a refusal
        with suppress(grpc.aio.AbortError):
            return await behaviour(_decoded(handler, request), context)
        return Nothing()

    async def stream(self, name: str, requests: Any, sent: Any) -> AsyncGenerator[Any]:
        """`requests`: one, as bytes, or an asynchronous iterator of them."""
        handler = await self._guarded(name, sent)
        context = ReplicaContext(sent, requests)
        behaviour = handler.stream_stream or handler.unary_stream
        decoded = _decoded if isinstance(requests, bytes) else _each_decoded
        running = asyncio.create_task(_run(behaviour(decoded(handler, requests), context), context))
        try:
            while (message := await context.written.get()) is not _END:
                yield message
                context.written.task_done()
            await running
        finally:
            running.cancel()
        if context.code():
            yield Nothing()  # carries the status

    async def _guarded(self, name: str, sent: Any) -> Any:
        path = self._paths[name]
        details = SimpleNamespace(method=path, invocation_metadata=sent.invocation_metadata())

        async def found(details: Any) -> Any:
            return self._handlers[path]

        return await self._interceptor.intercept_service(found, details)


class ReplicaContext:
    """As much of gRPC's context as our servicers and the interceptor use, over the one that Ray sends along."""

    def __init__(self, sent: Any, requests: Any = None) -> None:
        self._sent = sent
        self._requests = requests
        self.written: asyncio.Queue[Any] = asyncio.Queue()
        milliseconds = next((value for key, value in sent.invocation_metadata() if key == TIMEOUT), None)
        self._deadline = None if milliseconds is None else time.monotonic() + int(milliseconds) / 1000

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sent, name)

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._sent.set_trailing_metadata(list(trailing))

    async def read(self) -> Any:
        return await anext(aiter(self._requests), None)

    async def write(self, message: Any) -> None:
        """Returns when Ray has taken it."""
        self.written.put_nowait(message)
        await self.written.join()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        self._sent.set_code(code)
        self._sent.set_details(details)
        self.set_trailing_metadata((*trailing, (ANSWERED, "1")))
        raise grpc.aio.AbortError


async def _run(call: Any, context: ReplicaContext) -> None:
    try:
        with suppress(grpc.aio.AbortError):
            if hasattr(call, "__aiter__"):
                async for message in call:
                    await context.write(message)
            else:
                await call
    finally:
        context.written.put_nowait(_END)


def _decoded(handler: Any, request: bytes) -> Any:
    return request if handler.request_deserializer is None else handler.request_deserializer(request)


async def _each_decoded(handler: Any, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(handler, request)
