"""The client for asyncio: the same methods as `beamline.Client`, awaited.

from beamline import AsyncClient

async with AsyncClient() as client:
    print((await client.translate("Save the file.")).text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from beamline._async_methods import AsyncMethods
from beamline._calls import repository
from beamline._calls.operation import Operation, Rpc, Settings, Stream
from beamline._connected import CLOSED, Connected
from beamline._failures import Attempts
from beamline._lists import run_all
from beamline.errors import BeamlineError, Cancelled
from beamline.types import Model

__all__ = ["AsyncClient"]

Answer = TypeVar("Answer")


class AsyncClient(Connected, AsyncMethods):
    """Calls a server. Belongs to the event loop in which it is first used. Cancelling a task cancels its calls."""

    _loop: asyncio.AbstractEventLoop | None = None
    _opened: Any = None

    async def close(self) -> None:
        """Cancels what is in flight."""
        self._closed = True
        self._closing.set()
        if self._opened is not None:
            await self._opened.close()

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """What the server's repository holds, and what of it is ready."""
        return await self._one(repository.models(timeout))

    def _open(self) -> None:
        self._closing = asyncio.Event()

    def _channel(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise BeamlineError(CLOSED)
        if self._loop is None:
            self._opened = self._connection.aio_channel()
            self._loop = loop
        elif self._loop is not loop:
            raise BeamlineError("this client belongs to another event loop: make one in each")
        return self._opened

    async def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        """One answer, or the list of them, as the overloads of the methods say."""
        attempts = self._attempts(operation.settings)
        found = operation.refused(return_errors)

        async def ask(call: list[int]) -> None:
            found.update(await self._call(operation, call, attempts.again(), return_errors))

        await run_all(ask, *operation.calls(self._in_flight))
        answers: Answer | list[Answer] = operation.ordered(found)
        return answers

    async def _call(
        self, operation: Operation[Any], call: list[int], attempts: Attempts, return_errors: bool
    ) -> dict[int, Any]:
        """The answers of one call, by the indices of its items. Without an item that is at fault it is sent again."""
        found: dict[int, Any] = {}
        left = [call]
        while left:
            call = left.pop()
            try:
                response = await self._unary(operation.rpc, operation.request(call), operation.settings, attempts)
            except BeamlineError as error:
                failed = operation.failed(call, error, return_errors)
                found.update(failed.found)
                left += failed.again
                attempts = attempts.again()
            else:
                attempts.answered()
                found.update(zip(call, operation.answers(response), strict=True))
        return found

    async def _unary(self, rpc: Rpc, request: Any, settings: Settings, attempts: Attempts) -> Any:
        while True:
            method = self._channel().unary_unary(rpc.path, rpc.encode, rpc.decode)
            call = self._invoked(method, request, settings, attempts)
            try:
                return await call
            except grpc.RpcError as error:
                delay = self._delay(error, attempts)
            except asyncio.CancelledError:
                if self._closed_meanwhile():
                    raise Cancelled(CLOSED) from None
                raise
            await self._wait(delay)

    async def _stream(self, stream: Stream[Answer]) -> AsyncGenerator[Answer, None]:
        attempts = self._attempts(stream.settings)
        rpc = stream.rpc
        started = False
        while True:
            method = self._channel().unary_stream(rpc.path, rpc.encode, rpc.decode)
            call = self._invoked(method, stream.request, stream.settings, attempts)
            try:
                async for message in call:
                    started = True
                    yield stream.piece(message)
                return
            except grpc.RpcError as error:
                if started:
                    raise stream.explained(self._failure(error, attempts)) from error
                try:
                    delay = self._delay(error, attempts)
                except BeamlineError as failure:
                    raise stream.explained(failure) from error
            except asyncio.CancelledError:
                if self._closed_meanwhile():
                    raise Cancelled(CLOSED) from None
                raise
            finally:
                call.cancel()  # where it is over already, nothing happens
            await self._wait(delay)

    async def _wait(self, seconds: float) -> None:
        """Until the next attempt."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
            raise Cancelled(CLOSED)

    def _invoked(self, method: Callable[..., Any], request: Any, settings: Settings, attempts: Attempts) -> Any:
        return method(request, timeout=attempts.remaining, metadata=self._sent(settings))

    def _closed_meanwhile(self) -> bool:
        """If a `CancelledError` means that: gRPC raises it for a closed channel, too."""
        task = asyncio.current_task()
        return self._closed and (task is None or not task.cancelling())
