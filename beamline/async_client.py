"""The client for asyncio: the same methods as `beamline.Client`, awaited.

from beamline import AsyncClient

async with AsyncClient() as client:
    print((await client.translate("Save the file.")).text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

import grpc

from beamline import _messages
from beamline._channel import Connection, target_of
from beamline._failures import Attempts, failure_of
from beamline._messages import Operation, Rpc, Settings, Stream
from beamline.errors import BeamlineError, Cancelled, InvalidRequest
from beamline.types import (
    ChatMessages,
    ChatOptions,
    Classification,
    ClassifyOptions,
    Embedding,
    EmbedOptions,
    GenerateOptions,
    Generation,
    GenerationPiece,
    Input,
    Model,
    Prompt,
    Score,
    ScoreOptions,
    TranslateOptions,
    Translation,
    TranslationPiece,
)

__all__ = ["AsyncClient"]

_CLOSED = "this client is closed"

Answer = TypeVar("Answer")


class AsyncClient:
    """Calls a server. Belongs to the event loop in which it is first used. Cancelling a task cancels its calls."""

    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        tls: bool | str | Path | None = None,
        client_cert: str | Path | None = None,
        client_key: str | Path | None = None,
        timeout: float | None = None,
        retries: int = 5,
        in_flight: int = 64,
    ) -> None:
        """Connects when it is first used.

        target: HOST:PORT of the gRPC port; where it is left out, the environment's BEAMLINE_TARGET,
            else 127.0.0.1:8001.
        token: what `beamline token` printed.
        tls: True trusts the public authorities, a path is a PEM file of the authorities to trust.
        client_cert, client_key: PEM files, for servers that want to see a certificate.
        timeout: seconds that a method may take, repeated attempts included, unless its own `timeout` says otherwise.
        retries: how often a call is tried again that the server had no capacity for, or that did not reach it; within
            the timeout, and never after a stream's first piece.
        in_flight: how many items of a list are with the server at once.
        """
        if timeout is not None:
            _messages.check_timeout(timeout)
        if retries < 0 or in_flight < 1:
            raise InvalidRequest(f"retries is {retries} and in_flight {in_flight}; they must be at least 0 and 1")
        self._connection = Connection(target_of(target), token, tls, client_cert, client_key)
        self._metadata = self._connection.metadata()
        self._timeout = timeout
        self._retries = retries
        self._in_flight = in_flight
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: Any = None

    async def close(self) -> None:
        """Cancels what is in flight."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- methods -----------------------------------------------------------------------------------------------------

    @overload
    async def translate(self, text: Input, **options: Unpack[TranslateOptions]) -> Translation: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    async def translate(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[TranslateOptions]
    ) -> list[Translation]: ...

    @overload
    async def translate(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[TranslateOptions]
    ) -> list[Translation | BeamlineError]: ...

    async def translate(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[TranslateOptions]
    ) -> Translation | list[Translation] | list[Translation | BeamlineError]:
        """Translates a text, or each text of a list.

        A string gives one `Translation`, a list a list in the same order. Options are those of `TranslateOptions`,
        for instance `beam_size=4, num_hypotheses=2, return_scores=True`; what is left out is the model's default.
        One text that can't be translated raises `InvalidItem` with its index; with `return_errors=True` the exception
        stands in its place instead."""
        return await self._answer(_messages.translate(text, options), return_errors)

    def translate_stream(
        self, text: Input | Iterable[Input], **options: Unpack[TranslateOptions]
    ) -> AsyncGenerator[TranslationPiece, None]:
        """The same as it comes: of each text's best translation the words that are certain, never taken back.

        Closing the iterator cancels the call. A list is sent in one call, and its pieces say which text they are of."""
        return self._stream(_messages.translate_stream(text, options))

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    async def generate(
        self, prompt: Iterable[Prompt], *, return_errors: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    async def generate(
        self, prompt: Iterable[Prompt], *, return_errors: Literal[True], **options: Unpack[GenerateOptions]
    ) -> list[Generation | BeamlineError]: ...

    async def generate(
        self, prompt: Prompt | Iterable[Prompt], *, return_errors: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation] | list[Generation | BeamlineError]:
        """Continues a prompt with a language model, or each prompt of a list. Options: `GenerateOptions`."""
        return await self._answer(_messages.generate(prompt, options), return_errors)

    def generate_stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationPiece, None]:
        """The completions of a prompt, as they come. Closing the iterator cancels the call."""
        return self._stream(_messages.generate_stream(prompt, options))

    async def chat(self, messages: ChatMessages, **options: Unpack[ChatOptions]) -> Generation:
        """The assistant's next message. `messages` are `Message("user", "...")` or
        `{"role": "user", "content": "..."}`; a string is one message of the user. Options: `ChatOptions`."""
        return await self._one(_messages.chat(messages, options))

    def chat_stream(
        self, messages: ChatMessages, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[GenerationPiece, None]:
        """The same, as it comes. Closing the iterator cancels the call."""
        return self._stream(_messages.chat_stream(messages, options))

    @overload
    async def score(self, text: Input, *, source: Input | None = None, **options: Unpack[ScoreOptions]) -> Score: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    async def score(
        self,
        text: Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: Literal[False] = False,
        **options: Unpack[ScoreOptions],
    ) -> list[Score]: ...

    @overload
    async def score(
        self,
        text: Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: Literal[True],
        **options: Unpack[ScoreOptions],
    ) -> list[Score | BeamlineError]: ...

    async def score(
        self,
        text: Input | Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Score | list[Score] | list[Score | BeamlineError]:
        """How likely a model finds a text. `source`: for a model that translates, what the text is a
        translation of; one for all texts, or one for each."""
        return await self._answer(_messages.score(text, source, options), return_errors)

    @overload
    async def classify(self, text: Input, **options: Unpack[ClassifyOptions]) -> Classification: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    async def classify(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[ClassifyOptions]
    ) -> list[Classification]: ...

    @overload
    async def classify(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[ClassifyOptions]
    ) -> list[Classification | BeamlineError]: ...

    async def classify(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[ClassifyOptions]
    ) -> Classification | list[Classification] | list[Classification | BeamlineError]:
        """Labels with their probabilities, likeliest first. Options: `ClassifyOptions`."""
        return await self._answer(_messages.classify(text, options), return_errors)

    @overload
    async def embed(self, text: Input, **options: Unpack[EmbedOptions]) -> Embedding: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    async def embed(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[EmbedOptions]
    ) -> list[Embedding]: ...

    @overload
    async def embed(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[EmbedOptions]
    ) -> list[Embedding | BeamlineError]: ...

    async def embed(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[EmbedOptions]
    ) -> Embedding | list[Embedding] | list[Embedding | BeamlineError]:
        """A vector of each text. Options: `EmbedOptions`."""
        return await self._answer(_messages.embed(text, options), return_errors)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """What the server's repository holds, and what of it is ready."""
        return await self._one(_messages.models({} if timeout is None else {"timeout": timeout}))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _channel(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise BeamlineError(_CLOSED)
        if self._loop is None:
            self._opened = self._connection.aio_channel()
            self._loop = loop
        elif self._loop is not loop:
            raise BeamlineError("this client belongs to another event loop: make one in each")
        return self._opened

    async def _one(self, operation: Operation[Answer]) -> Answer:
        return cast(Answer, await self._answer(operation, return_errors=False))

    async def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        """One answer, or the list of them, as the overloads of the methods say."""
        found: dict[int, Any] = dict(operation.refused())
        if found and not return_errors:
            raise next(iter(found.values()))
        calls = operation.calls()
        attempts = self._attempts(operation.settings)
        if len(calls) == 1:
            found.update(await self._call(operation, calls[0], attempts, return_errors))
        elif calls:
            rest = iter(calls)

            async def work() -> None:
                for call in rest:
                    found.update(await self._call(operation, call, attempts.again(), return_errors))

            workers = max(1, min(len(calls), self._in_flight // operation.items_per_call))
            await _all([work() for _ in range(workers)])
        answers = [found[index] for index in range(len(operation.items))]
        return answers[0] if operation.single else answers

    async def _call(
        self, operation: Operation[Any], call: list[int], attempts: Attempts, return_errors: bool
    ) -> dict[int, Any]:
        """The answers of one call, by the indices of its items. Without an item that is at fault it is sent again."""
        found: dict[int, Any] = {}
        left = call
        while left:
            try:
                response = await self._unary(operation.rpc, operation.request(left), operation.settings, attempts)
            except BeamlineError as error:
                found.update(operation.failed(left, error, return_errors))
                left = [index for index in left if index not in found]
                attempts = attempts.again()
            else:
                attempts.answered()
                found.update(zip(left, operation.answers(response), strict=True))
                break
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
                    raise Cancelled(_CLOSED) from None
                raise
            await asyncio.sleep(delay)

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
                    raise Cancelled(_CLOSED) from None
                raise
            finally:
                call.cancel()  # where it is over already, nothing happens
            await asyncio.sleep(delay)

    def _invoked(self, method: Callable[..., Any], request: Any, settings: Settings, attempts: Attempts) -> Any:
        return method(request, timeout=attempts.remaining, metadata=[*self._metadata, *settings.metadata])

    def _closed_meanwhile(self) -> bool:
        """If a `CancelledError` means that: gRPC raises it for a closed channel, too."""
        task = asyncio.current_task()
        return self._closed and (task is None or not task.cancelling())

    def _attempts(self, settings: Settings) -> Attempts:
        return Attempts(self._retries, self._timeout if settings.timeout is None else settings.timeout)

    def _failure(self, error: grpc.RpcError, attempts: Attempts) -> BeamlineError:
        if self._closed:
            return Cancelled(_CLOSED)
        return failure_of(error, self._connection, attempts.timeout)

    def _delay(self, error: grpc.RpcError, attempts: Attempts) -> float:
        """Seconds until the next attempt. Raises what the error means where there is none."""
        try:
            return attempts.delay(self._failure(error, attempts))
        except BeamlineError as failure:
            raise failure from error


async def _all(work: Iterable[Any]) -> None:
    """Where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
        if failures:  # of several, the first item's
            raise min(failures, key=lambda error: float(getattr(error, "index", float("inf"))))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
