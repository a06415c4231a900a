"""What enters the engine, and what leaves it: token ids on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from serving.calls import DEFAULT_PRIORITY

_ids = itertools.count(1)


class FinishReason(StrEnum):
    EOS = "eos"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Complete: the model's defaults are already filled in, and every value is checked. Lengths as in Hugging Face
    `generate`: they count the start token, the prefix, and the end token."""

    beam_size: int
    num_hypotheses: int
    max_length: int
    min_length: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    prefix: tuple[int, ...] = ()
    time_limit: float | None = None  # seconds from submission
    return_alignment: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: tuple[int, ...]  # what was generated: without start token and prefix, with the end token
    token_log_probs: tuple[float, ...]
    score: float
    finish_reason: FinishReason
    alignment: tuple[tuple[float, ...], ...] | None = None  # [target token][source token]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    queue: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    hypotheses: tuple[Hypothesis, ...]  # best first
    timings: Timings


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to decode. `resolve` is called exactly once, on the engine's thread."""

    source: tuple[int, ...]
    options: DecodingOptions
    resolve: Callable[[Result | Exception], None]
    deadline: float | None = None  # on the engine's clock
    priority: int = DEFAULT_PRIORITY  # 0 is most urgent
    queue_deadline: float | None = None  # by when it must have a slot, on the engine's clock
    id: int = field(default_factory=lambda: next(_ids))
