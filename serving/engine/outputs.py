"""What an engine answers with, in token ids and numbers. `Output` is all that a request's reader can get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from beamline.serving.contract.backend import Floats
from beamline.serving.errors import Overloaded


def out_of_memory() -> Overloaded:
    """What a request is told for which the device has too little memory now: without it, the others go on."""
    return Overloaded("the device has too little memory left for this request; try again later")


class FinishReason(StrEnum):
    EOS = "eos"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    STOP = "stop"  # a stop string, or whatever else made the caller end it


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
    """Streaming: what has become certain of one hypothesis since the last piece. Of a sample its new token; of a beam
    search the tokens that all beams, and whatever else may still win, have in common. None of it is ever revised."""

    index: int  # of the hypothesis in the result
    tokens: tuple[int, ...]
    token_log_probs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...] = ()
    finish_reason: FinishReason | None = None  # in a sample's last piece


class Fate(StrEnum):
    LIVE = "live"
    PRUNED = "pruned"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a step might have gone on with, and what became of it."""

    token: int | None  # None: it was cut off without another token
    parent: int  # the candidate of the step before that it continues
    score: float
    normalized_score: float
    fate: Fate
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class TraceStep:
    """Streaming: is handed out at its step, to those who asked for a trace."""

    number: int
    candidates: tuple[Candidate, ...]
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """How a search went. `steps` are those that were not streamed before."""

    width: int
    samples: bool
    length_penalty: float
    steps: tuple[TraceStep, ...]
    ends: tuple[tuple[int, int], ...]  # step and candidate of each hypothesis
    truncated: bool


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
    trace: Trace | None = None  # where it was asked for


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities of what should follow each token of a given target."""

    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a classifier or an embedder found for one text, by the names of its graph's outputs."""

    outputs: Mapping[str, Floats]
    timings: Timings


Answer = Result | Scores | Pooled | Exception  # the last output of a request; it has exactly one
Output = Piece | TraceStep | Answer
