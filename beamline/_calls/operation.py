"""What a transport has to do for one call of a public method: requests to send, and answers to make of responses.

It knows neither which method it is nor how it is sent: from threads, from asyncio, or to a model in this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from beamline.errors import (
    BeamlineError,
    DeadlinePassed,
    InternalError,
    InvalidItem,
    InvalidRequest,
    Overloaded,
    Unavailable,
)

_ITEMS_PER_CALL = 16  # few enough that a long text holds up few others
_BYTES_PER_CALL = 1 << 20

_PRIORITY, _QUEUE_TIMEOUT = "x-beamline-priority", "x-beamline-queue-timeout-ms"
_WHERE = re.compile(r"(inputs|texts|sources)\[(\d+)\](?:\.(?:text|token_ids|features))?")
_PROMPT = re.compile(r"\b(?:prompt|text|token_ids)\b")  # what a sentence about the prompt names, and others don't
# What may have become of one item. With any other failure no item of the list would have been answered.
_OF_AN_ITEM = (InternalError, Overloaded, Unavailable, DeadlinePassed)

Answer = TypeVar("Answer")


class TooLarge(InvalidRequest):
    """A call, for the server's limit on messages. Nobody outside sees it."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method on the wire."""

    service: str
    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What travels with each call of an operation."""

    timeout: float | None
    priority: int | None = None
    queue_timeout: float | None = None  # seconds

    @property
    def metadata(self) -> list[tuple[str, str]]:
        sent = []
        if self.priority is not None:
            sent.append((_PRIORITY, str(self.priority)))
        if self.queue_timeout is not None:
            sent.append((_QUEUE_TIMEOUT, str(max(1, round(1000 * self.queue_timeout)))))
        return sent


@dataclass(frozen=True, slots=True)
class Operation(Generic[Answer]):
    rpc: Rpc
    settings: Settings
    single: bool  # one item was given, not a list
    items: Sequence[Any]  # messages, or an `InvalidItem` in the place of what can't be sent
    request: Callable[[Sequence[int]], Any]  # of the items with these indices
    answers: Callable[[Any], list[Answer]]  # of a response, in the order of its request
    items_per_call: int = _ITEMS_PER_CALL
    bytes_per_call: int = _BYTES_PER_CALL

    def order(self) -> list[int]:
        """The items that can be sent, by their indices: longest first, because neighbours of one length are the least
        work for a model, and short ones fill its slots at the end. Blank texts, which it refuses, come before all: so a
        list that will fail fails soon."""
        sendable = [index for index, item in enumerate(self.items) if not isinstance(item, InvalidItem)]
        if self.single:
            return sendable
        return sorted(sendable, key=lambda index: (bool(self.items[index].text.strip()), -self.items[index].ByteSize()))

    def calls(self, in_flight: int) -> tuple[list[list[int]], int]:
        """The items of each call, by their indices, and how many calls to make at once so that no more than so many
        items are in flight. Items that can't be sent are in none."""
        most = min(self.items_per_call, in_flight)
        calls: list[list[int]] = []
        size = 0
        for index in self.order():
            bytes_of_item = self.items[index].ByteSize()
            if not calls or len(calls[-1]) == most or size + bytes_of_item > self.bytes_per_call:
                calls.append([])
                size = 0
            calls[-1].append(index)
            size += bytes_of_item
        return calls, in_flight // most

    def refused(self, return_errors: bool) -> dict[int, Any]:
        """The items that can't be sent. Raises the first where errors are not to be returned."""
        found = {index: item for index, item in enumerate(self.items) if isinstance(item, InvalidItem)}
        if found and not return_errors:
            raise next(iter(found.values()))
        return found

    def ordered(self, found: Mapping[int, Any]) -> Any:
        """One answer, or the list of them, as the overloads of the methods say. Raises what kept every item from being
        answered."""
        sent = [found[index] for index, item in enumerate(self.items) if not isinstance(item, InvalidItem)]
        if sent and all(isinstance(each, Unavailable | DeadlinePassed) for each in sent):
            raise sent[0]
        answers = [found[index] for index in range(len(self.items))]
        return answers[0] if self.single else answers

    def failed(self, call: Sequence[int], error: BeamlineError, return_errors: bool) -> Failed:
        """What a failed call means for its items. Raises what is not to be returned."""
        failure = self.named(call, error)
        if not return_errors or self.single:
            raise failure from error.__cause__
        if isinstance(failure, InvalidItem):
            rest = [index for index in call if index != failure.index]
            return Failed({failure.index: failure}, [rest] if rest else [])
        if not isinstance(failure, _OF_AN_ITEM):
            raise failure from error.__cause__
        if isinstance(failure, InternalError) and len(call) > 1:  # which of them it was for shows one by one
            return Failed({}, [[index] for index in call])
        return Failed(dict.fromkeys(call, failure), [])

    def named(self, call: Sequence[int], error: BeamlineError) -> BeamlineError:
        """An item that a sentence names by its place in the call is named by its place in the list."""
        if not isinstance(error, InvalidRequest):
            return error
        sentence = str(error)
        found = _WHERE.search(sentence)
        if isinstance(error, TooLarge):
            alone = len(call) == 1 and not self.single
            return InvalidItem(f"item {call[0]}: {sentence}", call[0]) if alone else InvalidRequest(sentence)
        if self.single:
            what = "the source" if found is not None and found[1] == "sources" else "the text"
            return error if found is None else InvalidRequest(_replaced(found, what))
        if self.items_per_call == 1:  # each item has a call of its own
            return InvalidItem(f"item {call[0]}: {sentence}", call[0]) if _PROMPT.search(sentence) else error
        if found is None or int(found[2]) >= len(call):
            return error
        index = call[int(found[2])]
        what = f"the source of item {index}" if found[1] == "sources" else f"item {index}"
        return InvalidItem(_replaced(found, what), index)


def _replaced(found: re.Match[str], what: str) -> str:
    return f"{found.string[: found.start()]}{what}{found.string[found.end() :]}"


@dataclass(frozen=True, slots=True)
class Failed:
    """Of the items of a call: those that have failed, and what is to be sent again."""

    found: dict[int, BeamlineError]
    again: list[list[int]]


@dataclass(frozen=True, slots=True)
class Stream(Generic[Answer]):
    rpc: Rpc
    settings: Settings
    request: Any
    piece: Callable[[Any], Answer]
    explained: Callable[[BeamlineError], BeamlineError] = lambda error: error


def deadline_sentence(timeout: float) -> str:
    return f"no answer within the timeout of {timeout:g} s"
