"""The client for programs without an event loop. One is enough for all threads of a process.

from beamline import Client

with Client() as client:
    print(client.translate("Save the file.").text)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import grpc

from beamline._calls import repository
from beamline._calls.operation import Operation, Rpc, Settings, Stream
from beamline._connected import CLOSED, Connected
from beamline._failures import Attempts
from beamline._lists import run_in_threads
from beamline._methods import Methods
from beamline.errors import BeamlineError, Cancelled
from beamline.types import Model

__all__ = ["Client"]

Answer = TypeVar("Answer")

_CANCELLED = "the call was cancelled"


class Client(Connected, Methods):
    """Calls a server. Safe to use from many threads at once."""

    def _open(self) -> None:
        self._channel = self._connection.channel()
        self._lock = threading.Lock()
        self._groups: WeakSet[_Group] = WeakSet()

    def close(self) -> None:
        """Cancels what is in flight."""
        self._closed = True
        with self._lock:
            groups = list(self._groups)
        for group in groups:  # those that wait for another attempt, too
            group.stop()
        self._channel.close()

    def _group(self) -> _Group:
        group = _Group()
        with self._lock:
            self._groups.add(group)
        return group

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """What the server's repository holds, and what of it is ready."""
        return self._one(repository.models(timeout))

    def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        """One answer, or the list of them, as the overloads of the methods say."""
        found = operation.refused(return_errors)
        calls, at_once = operation.calls(self._in_flight)
        attempts = self._attempts(operation.settings)
        group = self._group()

        def ask(call: list[int]) -> None:
            found.update(self._call(operation, call, attempts.again(), group, return_errors))

        if len(calls) == 1:
            ask(calls[0])
        else:
            run_in_threads(ask, calls, min(len(calls), at_once), group.stop)
        answers: Answer | list[Answer] = operation.ordered(found)
        return answers

    def _call(
        self, operation: Operation[Any], call: list[int], attempts: Attempts, group: _Group, return_errors: bool
    ) -> dict[int, Any]:
        """The answers of one call, by the indices of its items. Without an item that is at fault it is sent again."""
        found: dict[int, Any] = {}
        left = [call]
        while left:
            call = left.pop()
            try:
                response = self._unary(operation.rpc, operation.request(call), operation.settings, attempts, group)
            except BeamlineError as error:
                failed = operation.failed(call, error, return_errors)
                found.update(failed.found)
                left += failed.again
                attempts = attempts.again()
            else:
                attempts.answered()
                found.update(zip(call, operation.answers(response), strict=True))
        return found

    def _unary(self, rpc: Rpc, request: Any, settings: Settings, attempts: Attempts, group: _Group) -> Any:
        method = self._invocable(partial(self._channel.unary_unary, rpc.path, rpc.encode, rpc.decode))
        while True:
            invoke = partial(method.future, request, timeout=attempts.remaining, metadata=self._sent(settings))
            call = group.start(partial(self._invocable, invoke))
            try:
                return call.result()
            except grpc.FutureCancelledError:
                raise self._cancelled() from None
            except grpc.RpcError as error:
                delay = self._delay(error, attempts)
            finally:
                group.end(call)
            if group.stopped.wait(delay):
                raise self._cancelled()

    def _cancelled(self) -> Cancelled:
        return Cancelled(CLOSED if self._closed else _CANCELLED)

    def _stream(self, stream: Stream[Answer]) -> Generator[Answer, None, None]:
        attempts = self._attempts(stream.settings)
        group = self._group()
        rpc = stream.rpc
        method = self._invocable(partial(self._channel.unary_stream, rpc.path, rpc.encode, rpc.decode))
        started = False
        while True:
            metadata = self._sent(stream.settings)
            call = self._invocable(partial(method, stream.request, timeout=attempts.remaining, metadata=metadata))
            try:
                for message in call:
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
            finally:
                call.cancel()  # where it is over already, nothing happens
            if group.stopped.wait(delay):
                raise self._cancelled()

    def _invocable(self, use: Callable[[], Any]) -> Any:
        """What uses the channel: a closed one raises `ValueError`."""
        try:
            return use()
        except ValueError as error:
            if not self._closed:
                raise
            raise BeamlineError(CLOSED) from error


class _Group:
    """The calls that one method has in flight: where one fails for all, the others are cancelled."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._running: set[Any] = set()

    def start(self, start: Callable[[], Any]) -> Any:
        with self._lock:
            if self.stopped.is_set():
                raise Cancelled(_CANCELLED)
            call = start()
            self._running.add(call)
            return call

    def end(self, call: Any) -> None:
        """Cancels it, if it still runs: its caller was interrupted."""
        with self._lock:
            self._running.discard(call)
        call.cancel()

    def stop(self) -> None:
        with self._lock:
            self.stopped.set()
            running = list(self._running)
        for call in running:
            call.cancel()
