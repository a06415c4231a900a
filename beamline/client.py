"""The client for programs without an event loop. One is enough for all threads of a process.

from beamline import Client

with Client() as client:
    print(client.translate("Save the file.").text)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
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

__all__ = ["Client"]

_CLOSED = "this client is closed"

Answer = TypeVar("Answer")


class Client:
    """Calls a server. Safe to use from many threads at once."""

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
        self._channel = self._connection.channel()

    def close(self) -> None:
        """Cancels what is in flight."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- methods -----------------------------------------------------------------------------------------------------

    @overload
    def translate(self, text: Input, **options: Unpack[TranslateOptions]) -> Translation: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    def translate(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[TranslateOptions]
    ) -> list[Translation]: ...

    @overload
    def translate(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[TranslateOptions]
    ) -> list[Translation | BeamlineError]: ...

    def translate(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[TranslateOptions]
    ) -> Translation | list[Translation] | list[Translation | BeamlineError]:
        """Translates a text, or each text of a list.

        A string gives one `Translation`, a list a list in the same order. Options are those of `TranslateOptions`,
        for instance `beam_size=4, num_hypotheses=2, return_scores=True`; what is left out is the model's default.
        One text that can't be translated raises `InvalidItem` with its index; with `return_errors=True` the exception
        stands in its place instead."""
        return self._answer(_messages.translate(text, options), return_errors)

    def translate_stream(
        self, text: Input | Iterable[Input], **options: Unpack[TranslateOptions]
    ) -> Generator[TranslationPiece, None, None]:
        """The same as it comes: of each text's best translation the words that are certain, never taken back.

        Closing the iterator cancels the call. A list is sent in one call, and its pieces say which text they are of."""
        return self._stream(_messages.translate_stream(text, options))

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    def generate(
        self, prompt: Iterable[Prompt], *, return_errors: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Iterable[Prompt], *, return_errors: Literal[True], **options: Unpack[GenerateOptions]
    ) -> list[Generation | BeamlineError]: ...

    def generate(
        self, prompt: Prompt | Iterable[Prompt], *, return_errors: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation] | list[Generation | BeamlineError]:
        """Continues a prompt with a language model, or each prompt of a list. Options: `GenerateOptions`."""
        return self._answer(_messages.generate(prompt, options), return_errors)

    def generate_stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationPiece, None, None]:
        """The completions of a prompt, as they come. Closing the iterator cancels the call."""
        return self._stream(_messages.generate_stream(prompt, options))

    def chat(self, messages: ChatMessages, **options: Unpack[ChatOptions]) -> Generation:
        """The assistant's next message. `messages` are `Message("user", "...")` or
        `{"role": "user", "content": "..."}`; a string is one message of the user. Options: `ChatOptions`."""
        return self._one(_messages.chat(messages, options))

    def chat_stream(
        self, messages: ChatMessages, **options: Unpack[ChatOptions]
    ) -> Generator[GenerationPiece, None, None]:
        """The same, as it comes. Closing the iterator cancels the call."""
        return self._stream(_messages.chat_stream(messages, options))

    @overload
    def score(self, text: Input, *, source: Input | None = None, **options: Unpack[ScoreOptions]) -> Score: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    def score(
        self,
        text: Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: Literal[False] = False,
        **options: Unpack[ScoreOptions],
    ) -> list[Score]: ...

    @overload
    def score(
        self,
        text: Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: Literal[True],
        **options: Unpack[ScoreOptions],
    ) -> list[Score | BeamlineError]: ...

    def score(
        self,
        text: Input | Iterable[Input],
        *,
        source: Input | Iterable[Input] | None = None,
        return_errors: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Score | list[Score] | list[Score | BeamlineError]:
        """How likely a model finds a text. `source`: for a model that translates, what the text is a
        translation of; one for all texts, or one for each."""
        return self._answer(_messages.score(text, source, options), return_errors)

    @overload
    def classify(self, text: Input, **options: Unpack[ClassifyOptions]) -> Classification: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    def classify(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[ClassifyOptions]
    ) -> list[Classification]: ...

    @overload
    def classify(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[ClassifyOptions]
    ) -> list[Classification | BeamlineError]: ...

    def classify(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[ClassifyOptions]
    ) -> Classification | list[Classification] | list[Classification | BeamlineError]:
        """Labels with their probabilities, likeliest first. Options: `ClassifyOptions`."""
        return self._answer(_messages.classify(text, options), return_errors)

    @overload
    def embed(self, text: Input, **options: Unpack[EmbedOptions]) -> Embedding: ...  # type: ignore[overload-overlap]  # a string is no list of letters

    @overload
    def embed(
        self, text: Iterable[Input], *, return_errors: Literal[False] = False, **options: Unpack[EmbedOptions]
    ) -> list[Embedding]: ...

    @overload
    def embed(
        self, text: Iterable[Input], *, return_errors: Literal[True], **options: Unpack[EmbedOptions]
    ) -> list[Embedding | BeamlineError]: ...

    def embed(
        self, text: Input | Iterable[Input], *, return_errors: bool = False, **options: Unpack[EmbedOptions]
    ) -> Embedding | list[Embedding] | list[Embedding | BeamlineError]:
        """A vector of each text. Options: `EmbedOptions`."""
        return self._answer(_messages.embed(text, options), return_errors)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """What the server's repository holds, and what of it is ready."""
        return self._one(_messages.models({} if timeout is None else {"timeout": timeout}))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _one(self, operation: Operation[Answer]) -> Answer:
        return cast(Answer, self._answer(operation, return_errors=False))

    def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        """One answer, or the list of them, as the overloads of the methods say."""
        found: dict[int, Any] = dict(operation.refused())
        if found and not return_errors:
            raise next(iter(found.values()))
        calls = operation.calls()
        attempts = self._attempts(operation.settings)
        group = _Group()
        if len(calls) == 1:
            found.update(self._call(operation, calls[0], attempts, group, return_errors))
        elif calls:
            workers = max(1, min(len(calls), self._in_flight // operation.items_per_call))
            with ThreadPoolExecutor(workers, thread_name_prefix="beamline-client") as pool:
                futures: list[Future[dict[int, Any]]] = [
                    pool.submit(self._call, operation, call, attempts.again(), group, return_errors) for call in calls
                ]
                try:
                    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                    failures = [error for future in done if (error := future.exception()) is not None]
                    if failures:
                        raise min(failures, key=_place)
                except BaseException:  # Ctrl-C too
                    pool.shutdown(wait=False, cancel_futures=True)
                    group.stop()
                    raise
                for future in futures:
                    found.update(future.result())
        answers = [found[index] for index in range(len(operation.items))]
        return answers[0] if operation.single else answers

    def _call(
        self, operation: Operation[Any], call: list[int], attempts: Attempts, group: _Group, return_errors: bool
    ) -> dict[int, Any]:
        """The answers of one call, by the indices of its items. Without an item that is at fault it is sent again."""
        found: dict[int, Any] = {}
        left = call
        while left:
            try:
                response = self._unary(operation.rpc, operation.request(left), operation.settings, attempts, group)
            except BeamlineError as error:
                found.update(operation.failed(left, error, return_errors))
                left = [index for index in left if index not in found]
                attempts = attempts.again()
            else:
                attempts.answered()
                found.update(zip(left, operation.answers(response), strict=True))
                break
        return found

    def _unary(self, rpc: Rpc, request: Any, settings: Settings, attempts: Attempts, group: _Group) -> Any:
        method = self._invocable(partial(self._channel.unary_unary, rpc.path, rpc.encode, rpc.decode))
        while True:
            invoke = partial(method.future, request, timeout=attempts.remaining, metadata=self._sent(settings))
            call = group.start(partial(self._invocable, invoke))
            try:
                return call.result()
            except grpc.FutureCancelledError:
                raise Cancelled(_CLOSED if self._closed else "the call was cancelled") from None
            except grpc.RpcError as error:
                delay = self._delay(error, attempts)
            finally:
                group.end(call)
            if group.stopped.wait(delay):
                raise Cancelled("the call was cancelled")

    def _stream(self, stream: Stream[Answer]) -> Generator[Answer, None, None]:
        attempts = self._attempts(stream.settings)
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
            time.sleep(delay)

    def _attempts(self, settings: Settings) -> Attempts:
        return Attempts(self._retries, self._timeout if settings.timeout is None else settings.timeout)

    def _sent(self, settings: Settings) -> list[tuple[str, str]]:
        return [*self._metadata, *settings.metadata]

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

    def _invocable(self, use: Callable[[], Any]) -> Any:
        """What uses the channel: a closed one raises `ValueError`."""
        try:
            return use()
        except ValueError as error:
            if not self._closed:
                raise
            raise BeamlineError(_CLOSED) from error


class _Group:
    """The calls that one method has in flight: where one fails for all, the others are cancelled."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._running: set[Any] = set()

    def start(self, start: Callable[[], Any]) -> Any:
        with self._lock:
            if self.stopped.is_set():
                raise Cancelled("the call was cancelled")
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


def _place(error: BaseException) -> float:
    """Of several failures the first item's is raised."""
    return float(getattr(error, "index", float("inf")))
