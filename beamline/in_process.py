"""A model in this process: no server, no network.

from beamline import load

with load("model_repo/en-de") as model:
    print(model.translate("Save the file.").text)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypedDict, TypeVar, Unpack

from beamline._async_methods import AsyncMethods
from beamline._calls.arguments import names_what_it_knows
from beamline._calls.operation import Operation, Settings, Stream, deadline_sentence
from beamline._calls.requests import checked_timeout
from beamline._lists import run_all
from beamline._methods import Methods
from beamline.errors import (
    BeamlineError,
    Cancelled,
    DeadlinePassed,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from beamline.serving import in_process
from beamline.serving.api.status import first_failure
from beamline.serving.contract.call import DEFAULT_PRIORITY, Call, enter
from beamline.serving.errors import ComputeError, ModelUnavailable, ShuttingDown
from beamline.serving.in_process import CLOSED, InProcess, LoadOptions
from beamline.version import needed

__all__ = ["AsyncLoadedModel", "LoadedModel", "load", "load_async"]

Answer = TypeVar("Answer")
Deliver = Callable[[Any], None]

_END = object()  # of a stream


@names_what_it_knows
def load(
    path: str | PathLike[str],
    *,
    version: int | None = None,
    device: str = "auto",
    threads: int = 0,
    engines: int = 0,
    slots: int = 0,
    queue: int = 0,
    prefix_cache_mib: int = 512,
    timeout: float | None = None,
) -> LoadedModel:
    """Loads a model into this process: checked against its hashes, and warm.

    path: a model's folder, `model_repo/en-de`, for its newest version, or a version's, `model_repo/en-de/4`.
    version: which of the model's versions.
    device: auto (the best that is here), cpu, cuda or tensorrt.
    threads: on the CPU; 0: as many as there are cores.
    engines: that share the threads; 0: several for a small model, one for a larger one.
    slots: how many sequences are decoded at once; 0: 32.
    queue: how many may wait behind them before `Overloaded` is raised; 0: as many as come.
    prefix_cache_mib: memory for the prompts that a language model remembers; 0: none.
    timeout: seconds that a method may take unless its own `timeout` says otherwise.

    What the model's serving.toml says of defaults, slots, engines, device and shortlist counts where nothing is given.
    A `ModelNotFound` or `ModelError` says why it can't be loaded.
    """
    if timeout is not None:
        timeout = checked_timeout(timeout)
    options = LoadOptions(version, device, threads, engines, slots, queue, prefix_cache_mib)
    try:
        return LoadedModel(in_process.load(Path(path), options), timeout)
    except ModuleNotFoundError as error:
        advice = needed(error)
        if advice is None:
            raise
        raise BeamlineError(f"beamline.load {advice}") from error


class LoadArguments(TypedDict, total=False):
    """Those of `load`."""

    version: int | None
    device: str
    threads: int
    engines: int
    slots: int
    queue: int
    prefix_cache_mib: int
    timeout: float | None


async def load_async(path: str | PathLike[str], **arguments: Unpack[LoadArguments]) -> AsyncLoadedModel:
    """The same as `load`, for asyncio: it loads in a thread, and the model's methods are awaited."""
    return (await asyncio.to_thread(partial(load, path, **arguments))).aio


class _Loaded:
    def __init__(self, process: InProcess, timeout: float | None) -> None:
        self._process = process
        self._timeout = timeout

    @property
    def name(self) -> str:
        return self._process.manifest.name

    @property
    def version(self) -> str:
        return str(self._process.manifest.version)

    @property
    def task(self) -> str:
        """translate, generate, classify or embed."""
        return self._process.manifest.task

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} version {self.version}{', closed' if self._process.closed else ''}>"

    def _run(self, operation: Operation[Answer], return_errors: bool) -> Any:
        return _answer(self._process, operation, return_errors, self._seconds(operation.settings))

    def _pump(self, stream: Stream[Any], deliver: Deliver) -> Any:
        return _pump(self._process, stream, self._seconds(stream.settings), deliver)

    def _seconds(self, settings: Settings) -> float | None:
        return self._timeout if settings.timeout is None else settings.timeout


class LoadedModel(_Loaded, Methods):
    """A model in this process. Safe to use from many threads at once; `aio` is the same model for asyncio."""

    @property
    def aio(self) -> AsyncLoadedModel:
        """The same model, with methods that are awaited, on any event loop."""
        return AsyncLoadedModel(self._process, self._timeout)

    def close(self) -> None:
        """Cancels what runs, and gives threads and memory back."""
        self._process.close()

    def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        future = self._process.submit(self._run(operation, return_errors))
        try:
            answers: Answer | list[Answer] = future.result()
        except CancelledError:
            raise Cancelled(CLOSED) from None
        finally:
            future.cancel()  # where it is over already, nothing happens; else the caller was interrupted
        return answers

    def _stream(self, stream: Stream[Answer]) -> Generator[Answer, None, None]:
        pieces: SimpleQueue[Any] = SimpleQueue()
        future = self._process.submit(self._pump(stream, pieces.put))
        try:
            while (piece := pieces.get()) is not _END:
                if isinstance(piece, BeamlineError):
                    raise piece
                yield piece
        finally:
            future.cancel()


class AsyncLoadedModel(_Loaded, AsyncMethods):
    """A model in this process, for asyncio: on any event loop, and on several. Cancelling a task cancels its calls."""

    async def close(self) -> None:
        """Cancels what runs, and gives threads and memory back."""
        await asyncio.to_thread(self._process.close)

    async def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        future = self._process.submit(self._run(operation, return_errors))
        try:
            answers: Answer | list[Answer] = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._process.closed and (task is None or not task.cancelling()):
                raise Cancelled(CLOSED) from None
            raise
        return answers

    async def _stream(self, stream: Stream[Answer]) -> AsyncGenerator[Answer, None]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(piece: Any) -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        future = self._process.submit(self._pump(stream, deliver))
        try:
            while (piece := await pieces.get()) is not _END:
                if isinstance(piece, BeamlineError):
                    raise piece
                yield piece
        finally:
            future.cancel()


# -- on the model's own event loop -----------------------------------------------------------------------------------


async def _answer(process: InProcess, operation: Operation[Any], return_errors: bool, timeout: float | None) -> Any:
    """Every item is a call of its own, so that what happens to one is nothing to the others."""
    inference, settings = process.inference, operation.settings
    deadline = None if timeout is None else time.monotonic() + timeout
    method = getattr(inference, operation.rpc.name)
    found = operation.refused(return_errors)
    waiting = _Waiting()
    enter(_call(settings))

    async def ask(index: int) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                response = await waiting.run(lambda: method(operation.request([index]), deadline))
        except Exception as error:
            found.update(operation.failed([index], _failure(error, timeout), return_errors).found)
        else:
            found[index] = operation.answers(response)[0]

    await run_all(ask, operation.order(), 2 * process.slots)  # enough that no slot is idle, and few enough to be sorted
    return operation.ordered(found)


async def _pump(process: InProcess, stream: Stream[Any], timeout: float | None, deliver: Deliver) -> None:
    """Brings a stream's pieces to its reader; at last `_END`, or an exception."""
    deadline = None if timeout is None else time.monotonic() + timeout
    method = getattr(process.inference, stream.rpc.name)
    enter(_call(stream.settings))
    try:
        async with asyncio.timeout_at(deadline), aclosing(method(stream.request, deadline)) as replies:
            async for reply in replies:
                deliver(stream.piece(reply))
    except asyncio.CancelledError:
        deliver(Cancelled(CLOSED))  # nobody reads where the reader has cancelled it
        raise
    except Exception as error:
        deliver(stream.explained(_failure(error, timeout)))
    else:
        deliver(_END)


class _Waiting:
    """Items of a list for which the queue is full, while others of the same list are under way, wait for these."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = asyncio.Event()

    async def run(self, call: Callable[[], Any]) -> Any:
        while True:
            self._running += 1
            waits = False
            try:
                return await call()
            except Overloaded:
                waits = self._running > 1
                if not waits:
                    raise
            finally:
                self._running -= 1
                if not waits:  # who waits as well leaves no room
                    self._changed.set()
            self._changed.clear()
            await self._changed.wait()


def _call(settings: Settings) -> Call:
    priority = DEFAULT_PRIORITY if settings.priority is None else settings.priority
    return Call(priority=priority, queue_timeout=settings.queue_timeout)


def _failure(error: Exception, timeout: float | None) -> BeamlineError:
    """As a client would raise it."""
    error = first_failure(error)
    if isinstance(error, TimeoutError | DeadlinePassed) and timeout is not None:
        return DeadlinePassed(deadline_sentence(timeout))
    if isinstance(error, ModelUnavailable | ShuttingDown):
        return Unavailable(str(error))
    if isinstance(error, RequestError):
        return error
    what = "the model could not compute this request" if isinstance(error, ComputeError) else "internal error"
    failure = InternalError(f"{what}: {error}")
    failure.__cause__ = error
    return failure
