"""What goes into the clients' methods and what comes back: plain, immutable, without protobuf.

Options that are left out, or None, are the model's defaults; protos/beamline.proto describes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

FinishReason: TypeAlias = Literal["eos", "length", "time_limit", "stop"]
EarlyStopping: TypeAlias = bool | Literal["never"]
Pooling: TypeAlias = Literal["last", "mean", "max", "attention"]

# -- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of the model's vocabulary, exactly as the model shall see them: nothing is added."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Features:
    """A matrix for encoders that read no text: a row per position, all of one length."""

    rows: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Message:
    """Of a chat. `role` is system, user, assistant, or what the model's template knows."""

    role: str
    content: str


Prompt: TypeAlias = str | TokenIds
Input: TypeAlias = str | TokenIds | Features
ChatMessages: TypeAlias = str | Sequence[Message | Mapping[str, str]]  # a string: one message of the user

# -- options ---------------------------------------------------------------------------------------------------------


class CallOptions(TypedDict, total=False):
    """Of every method that asks a model."""

    model: str | None  # left out: the server's default, if it does what is asked for, else the only one that does
    version: str | int | None  # left out: the newest
    timeout: float | None  # seconds for the whole of it: a list's calls and repeated attempts included
    priority: int | None  # 0 (most urgent) to 3; 1 where it is left out
    queue_timeout: float | None  # seconds that a sequence may wait for a slot


class TranslateOptions(CallOptions, total=False):
    source_language: str | None  # for models that know several
    target_language: str | None
    beam_size: int | None  # 1: greedy
    num_hypotheses: int | None  # at most beam_size; where it samples: how many samples
    length_penalty: float | None  # scores are divided by length ** length_penalty
    early_stopping: EarlyStopping | None
    min_length: int | None  # lengths count the start token, the prefix and the end token
    max_length: int | None
    no_repeat_ngram_size: int | None  # 0: off
    repetition_penalty: float | None  # 1: off
    target_prefix: str | None  # the translation begins with this text
    suppress_tokens: Sequence[int] | None  # ids that are never produced
    time_limit_ms: int | None  # the best so far when it is over
    split_sentences: bool | None  # split long text, translate the parts, join them
    return_scores: bool | None  # score and token_log_probs
    return_tokens: bool | None
    return_alignment: bool | None
    return_search_trace: bool | None  # how the search went: docs/search-trace.md
    temperature: float | None  # 0: beam search or greedy; above: translations are drawn, with beam_size 1
    top_k: int | None  # 0: off
    top_p: float | None  # 1: off
    min_p: float | None  # 0: off
    seed: int | None  # the same seed gives the same answers
    stop: str | Sequence[str] | None  # the translation ends before the first of these


class GenerateOptions(CallOptions, total=False):
    """Lengths count only what is generated."""

    max_tokens: int | None
    min_tokens: int | None  # no end before
    n: int | None  # completions: samples, or the best of the beams
    beam_size: int | None  # 1: no beam search
    temperature: float | None  # 0: the likeliest token, no sampling
    top_k: int | None  # 0: off
    top_p: float | None  # 1: off
    min_p: float | None  # 0: off
    seed: int | None  # the same seed gives the same completions
    repetition_penalty: float | None  # 1: off
    presence_penalty: float | None  # 0: off
    frequency_penalty: float | None  # 0: off
    logit_bias: Mapping[int, float] | None  # token id -> added to its logit; -100 and below forbids
    no_repeat_ngram_size: int | None  # 0: off
    suppress_tokens: Sequence[int] | None
    stop: str | Sequence[str] | None  # the completion ends before the first of these
    ignore_eos: bool | None  # never end before max_tokens
    length_penalty: float | None  # of beam search
    early_stopping: EarlyStopping | None
    time_limit_ms: int | None  # the best so far when it is over
    echo: bool | None  # the prompt stands before each completion
    return_tokens: bool | None
    return_log_probs: bool | None
    top_log_probs: int | None  # of so many likeliest tokens at each place; at most 20
    return_search_trace: bool | None  # as in TranslateOptions


class ChatOptions(GenerateOptions, total=False):
    add_generation_prompt: bool | None  # begin the assistant's turn; true unless set


class ScoreOptions(CallOptions, total=False):
    source_language: str | None  # as in TranslateOptions
    target_language: str | None


class ClassifyOptions(CallOptions, total=False):
    top_k: int | None  # only the likeliest labels
    truncate: bool | None  # read only the beginning of a text that is too long, instead of refusing it


class EmbedOptions(CallOptions, total=False):
    pooling: Pooling | None
    normalize: bool | None  # to length one
    truncate: bool | None  # as in ClassifyOptions


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds inside the server."""

    queue_ms: float
    encode_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class TopToken:
    id: int
    piece: str
    log_prob: float


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    piece: str
    log_prob: float | None = None  # where asked for
    top: tuple[TopToken, ...] = ()  # the likeliest at this place, best first
    from_prompt: bool = False  # only with echo


@dataclass(frozen=True, slots=True)
class Hypothesis:
    text: str
    score: float | None  # sum of log-probabilities / length ** length_penalty, where asked for
    tokens: tuple[Token, ...]  # where asked for
    token_log_probs: tuple[float, ...]  # one per generated token, the end token included
    alignment: tuple[tuple[float, ...], ...]  # a row per target token: how much it attended to each source token
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """What a step of the search might have gone on with, and what became of it."""

    id: int | None  # None where a hypothesis was cut off without another token
    piece: str
    parent: int  # the candidate of the step before that it continues; of no meaning in the first step
    score: float  # the sum of log-probabilities
    normalized_score: float  # divided by length ** length_penalty
    fate: Literal["live", "pruned", "finished"]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class SearchStep:
    number: int
    candidates: tuple[SearchCandidate, ...]  # best first; samples in their order
    forced: bool  # the token was given
    part: int  # of a text that was split


@dataclass(frozen=True, slots=True)
class SearchTrace:
    """How one sequence was searched, step by step."""

    beam_size: int  # or how many samples
    samples: bool
    length_penalty: float
    steps: tuple[SearchStep, ...]  # empty in a stream, where they came before
    hypotheses: tuple[tuple[int, int], ...]  # step and candidate that each hypothesis of the answer ends with
    truncated: bool  # later steps are not recorded


@dataclass(frozen=True, slots=True)
class Translation:
    hypotheses: tuple[Hypothesis, ...]  # best first
    source_tokens: int
    target_tokens: int  # of the best hypothesis
    timings: Timings
    model: str  # that answered; in a stream, as the call named it
    version: str
    source: tuple[Token, ...] = ()  # where tokens and alignment are asked for: what the weights of a row are of
    search_traces: tuple[SearchTrace, ...] = ()  # where asked for: one, or one for each part of a text that was split

    @property
    def text(self) -> str:
        """The best hypothesis'."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float | None:
        return self.hypotheses[0].score


@dataclass(frozen=True, slots=True)
class TranslationPiece:
    """Of one text's best translation. The pieces of a text, one behind the other, are its translation."""

    index: int  # which of the texts
    text: str  # to be appended; whole characters
    translation: Translation | None  # in the last piece of a text
    search_steps: tuple[SearchStep, ...] = ()  # where asked for: those since the last piece


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # of them, taken from the prefix cache
    generated_tokens: int  # over all completions


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    tokens: tuple[Token, ...]  # where asked for
    finish_reason: FinishReason | None
    score: float | None  # where log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class Generation:
    completions: tuple[Completion, ...]  # n of them: samples in order, or beams best first
    usage: Usage
    timings: Timings
    model: str
    version: str
    search_trace: SearchTrace | None = None  # where asked for

    @property
    def text(self) -> str:
        """The first completion's."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class GenerationPiece:
    index: int  # which of the n completions
    text: str  # to be appended; whole characters, or none yet
    tokens: tuple[Token, ...]  # where asked for: all since the last piece
    finish_reason: FinishReason | None  # in the last piece of a completion
    usage: Usage | None  # in the very last piece
    search_steps: tuple[SearchStep, ...] = ()  # where asked for: those since the last piece
    search_trace: SearchTrace | None = None  # where asked for, in the very last piece


@dataclass(frozen=True, slots=True)
class Score:
    tokens: tuple[Token, ...]  # a first token that nothing stands before has no log-probability
    log_prob: float  # the sum
    perplexity: float  # exp(-log_prob / scored_tokens)
    scored_tokens: int
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    index: int  # its place among the model's labels
    probability: float


@dataclass(frozen=True, slots=True)
class Classification:
    labels: tuple[Label, ...]  # likeliest first
    source_tokens: int
    timings: Timings
    model: str
    version: str

    @property
    def label(self) -> str:
        """The likeliest."""
        return self.labels[0].name


@dataclass(frozen=True, slots=True)
class Embedding:
    values: tuple[float, ...]
    source_tokens: int
    timings: Timings
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a model in the server's repository."""

    name: str
    version: str
    state: str  # READY, LOADING, UNAVAILABLE, ...
    reason: str  # why it is not ready

    @property
    def ready(self) -> bool:
        return self.state == "READY"
