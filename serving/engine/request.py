"""What enters the engine, and what leaves it: token ids on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Source
from beamline.serving.contract.call import DEFAULT_PRIORITY

_ids = itertools.count(1)


def next_id() -> int:
    return next(_ids)


class FinishReason(StrEnum):
    EOS = "eos"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    STOP = "stop"  # the caller has seen enough: a stop string


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Complete: the model's defaults are already filled in, and every value is checked. Lengths as in Hugging Face
    `generate`: they count the start token, the prefix, and the end token. A prompt's last token is its start token."""

    beam_size: int  # or how many samples
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
    # Sampling, where the temperature is above 0.
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_log_probs: int = 0  # how many of the likeliest tokens at each place are reported

    @property
    def samples(self) -> bool:
        return self.temperature > 0


Alternatives = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: tuple[int, ...]  # what was generated: without start token and prefix, with the end token
    token_log_probs: tuple[float, ...]
    score: float
    finish_reason: FinishReason
    alignment: tuple[tuple[float, ...], ...] | None = None  # [target token][source token]
    alternatives: tuple[Alternatives, ...] = ()  # one per token, where they were asked for


@dataclass(frozen=True, slots=True)
class Piece:
    """What has become certain of one hypothesis since the last piece: of a sample its new token; of a beam search the
    words that all beams, and whatever else may still win, have in common. Nothing of it is ever taken back."""

    index: int  # of the hypothesis in the result
    tokens: tuple[int, ...]
    token_log_probs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...] = ()
    finish_reason: FinishReason | None = None  # in a sample's last piece


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    queue: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    hypotheses: tuple[Hypothesis, ...]  # best first; samples in their order
    timings: Timings
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to decode. `resolve` is called exactly once, and `progress` as often as there is news before that,
    both on the engine's thread: they must not block."""

    source: tuple[int, ...]  # or the prompt
    options: DecodingOptions
    resolve: Callable[[Result | Exception], None]
    deadline: float | None = None  # on the engine's clock
    progress: Callable[[Piece], None] | None = None
    priority: int = DEFAULT_PRIORITY  # 0 is most urgent
    queue_deadline: float | None = None  # by when it must have a slot, on the engine's clock
    features: NDArray[np.float32] | None = None  # instead of a source, which is empty then
    id: int = field(default_factory=next_id)

    @property
    def reads(self) -> Source:
        """What its encoder gets."""
        return self.source if self.features is None else self.features
