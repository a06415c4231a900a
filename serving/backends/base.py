"""All that a device has to do.

A slot is one request's row in every arena. The engine decides which slot belongs to whom, what the next step's
shape is, and when to compact; a backend owns the memory and runs the graphs. Slots 0..B-1 are the active ones.
B requests, K beams, C cache entries, S source positions, M candidates, E logit edits per beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

DEAD = np.float32(-1e9)  # the score of a beam that does not exist


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one step."""

    batch: int
    beams: int
    cache: int
    source: int


@dataclass(frozen=True, slots=True)
class Start:
    """How a request begins."""

    token: int
    width: int  # its beams, of the K that the batch has
    independent: bool  # greedy: logit rules act on logits instead of log-probabilities


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host adds to a step; the rest is already on the device."""

    forced: Ints  # [B]: the next word of a forced prefix, or -1
    edit_index: Ints  # [B, K, E]
    edit_scale: Floats
    edit_add: Floats


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the host sees of a step. The arrays are the backend's: read them before the next run."""

    tokens: Ints  # [B, K]: the beams that live on
    parents: Ints  # [B, K]
    scores: Floats  # [B, K]
    candidate_scores: Floats  # [B, M]: the best continuations, those that end among them
    candidate_tokens: Ints
    candidate_parents: Ints


@dataclass(frozen=True, slots=True)
class Scored:
    token_log_probs: Floats  # [T]
    attention: Floats  # [T, S]


class Backend(Protocol):
    """`Memory` is opaque to the engine: what the encoder made of one request."""

    def allocate(self, slots: int, largest: Shape) -> int:
        """Reserves the arenas, zeroed, for every shape up to `largest`; returns their size in bytes."""

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Any]:
        """One memory per source; the caller groups sources of similar length."""

    def resize(self, shape: Shape, rows: int) -> bool:
        """Prepares for steps of this shape, keeping slots 0..rows-1; true where data had to be laid out anew."""

    def place(self, slot: int, memory: Any, start: Start) -> None:
        """Makes the slot a new request's."""

    def move(self, source: int, target: int) -> None:
        """The target slot becomes what the source slot is."""

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        """Keeps only these cache entries of a slot, in this order, at its beginning."""

    def zero(self, slot: int) -> None:
        """Wipes a slot, so that nothing of its tenant can reach the next one."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of the current shape."""

    def score(self, source: Sequence[int], target: Sequence[int], start_token: int) -> Scored:
        """The teacher-forced pass over one pair."""
