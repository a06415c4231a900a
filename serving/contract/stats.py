"""What the engine says about itself: one plain record a step. Prometheus is one consumer of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that has just been answered. Times in seconds."""

    outcome: Outcome
    queue_seconds: float
    first_token_seconds: float | None  # from submission to its first decoded step
    total_seconds: float
    source_tokens: int
    target_tokens: int  # of the best hypothesis
    encode_seconds: float = 0.0
    slot: int | None = None  # that it had at the end, among all engines of the model; None: it never had one


@dataclass(frozen=True, slots=True)
class StepStats:
    slots: int
    active: int  # requests that took part in this step
    remaining: int  # of them, and of those that joined, still running after it
    queued: int  # still waiting after it
    beam_width: int  # K of this step; 0 where nothing was decoded
    cache_length: int  # C
    source_length: int  # S
    live_entries: int  # cache entries in use, over all active slots
    admitted: int
    encode_seconds: float
    decode_seconds: float
    step_seconds: float
    moves: int  # the three copies that are allowed
    relayouts: int
    compactions: int
    finished: tuple[Finished, ...] = ()
    prompt_tokens: int = 0  # of the prompts that were taken in completely
    cached_prompt_tokens: int = 0  # of them, found in the prefix cache
    prefix_cache_bytes: int = 0
