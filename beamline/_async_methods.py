"""Made of `_methods.py` by `make methods`: the same methods, awaited. Not to be edited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, cast, overload

from beamline._calls import generate, pooled, score, translate
from beamline._calls.operation import Operation, Stream
from beamline.errors import BeamlineError
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
    Prompt,
    Score,
    ScoreOptions,
    TranslateOptions,
    Translation,
    TranslationPiece,
)

Answer = TypeVar("Answer")


class AsyncMethods(ABC):
    """Whoever inherits them says how an operation is carried out."""

    @abstractmethod
    async def _answer(
        self, operation: Operation[Answer], return_errors: bool
    ) -> Answer | list[Answer] | list[Answer | BeamlineError]:
        """One answer, or the list of them, as the overloads of the methods say."""

    @abstractmethod
    def _stream(self, stream: Stream[Answer]) -> AsyncGenerator[Answer, None]:
        """Its pieces. Closing it cancels the call."""

    async def _one(self, operation: Operation[Answer]) -> Answer:
        return cast(Answer, await self._answer(operation, return_errors=False))

    @abstractmethod
    async def close(self) -> None:
        """Cancels what is under way, and gives back what it has."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
        return await self._answer(translate.translate(text, options), return_errors)

    def translate_stream(
        self, text: Input | Iterable[Input], **options: Unpack[TranslateOptions]
    ) -> AsyncGenerator[TranslationPiece, None]:
        """The same as it comes: of each text's best translation the words that are certain, never taken back.

        Closing the iterator cancels the call. A list is sent in one call, and its pieces say which text they are of."""
        return self._stream(translate.translate_stream(text, options))

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
        return await self._answer(generate.generate(prompt, options), return_errors)

    def generate_stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationPiece, None]:
        """The completions of a prompt, as they come. Closing the iterator cancels the call."""
        return self._stream(generate.generate_stream(prompt, options))

    async def chat(self, messages: ChatMessages, **options: Unpack[ChatOptions]) -> Generation:
        """The assistant's next message. `messages` are `Message("user", "...")` or
        `{"role": "user", "content": "..."}`; a string is one message of the user. Options: `ChatOptions`."""
        return await self._one(generate.chat(messages, options))

    def chat_stream(
        self, messages: ChatMessages, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[GenerationPiece, None]:
        """The same, as it comes. Closing the iterator cancels the call."""
        return self._stream(generate.chat_stream(messages, options))

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
        return await self._answer(score.score(text, source, options), return_errors)

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
        return await self._answer(pooled.classify(text, options), return_errors)

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
        return await self._answer(pooled.embed(text, options), return_errors)
