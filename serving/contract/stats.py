"""What the engine says about itself: one plain record a step. Prometheus is one consumer of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Stay:
    """A request in a slot, until it ended or moved into one that had become free."""

    slot: int  # among all engines of the model
    seconds: float


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
    stays: tuple[Stay, ...] = ()  # one after the other, the last until its end; none: it never had a slot


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Of a GPU, since a model was loaded. Bytes are those at this moment."""

    used_bytes: int  # by this model
    reserved_bytes: int  # that it holds on to
    free_bytes: int
    steps: int
    replayed: int  # of them, as a recorded CUDA graph
    seconds: float  # that they took on the device
    copies: int  # that the host asked for
    copied_bytes: int
    waits: int  # of the host

    def __add__(self, other: DeviceStats) -> DeviceStats:
        """Of engines on several GPUs."""
        return DeviceStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, before: DeviceStats) -> DeviceStats:
        return DeviceStats(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@dataclass(slots=True)
class StepStats:
    """One step of an engine, which fills it in as it goes."""

    slots: int
    active: int = 0  # requests that took part in this step
    remaining: int = 0  # of them, and of those that joined, still running after it
    queued: int = 0  # still waiting after it
    beam_width: int = 0  # K of this step; 0 where nothing was decoded
    cache_length: int = 0  # C
    source_length: int = 0  # S
    live_entries: int = 0  # cache entries in use, over all active slots
    admitted: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    moves: int = 0  # the three copies that are allowed
    relayouts: int = 0
    compactions: int = 0
    finished: tuple[Finished, ...] = ()
    prompt_tokens: int = 0  # of the prompts that were taken in completely
    cached_prompt_tokens: int = 0  # of them, found in the prefix cache
    prefix_cache_bytes: int = 0
    device: DeviceStats | None = None  # of a GPU; not with every step
