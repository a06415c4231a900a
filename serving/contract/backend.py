"""All that a device has to do.

A slot is one request's row in every arena. The engine decides which slot belongs to whom, what the next step's
shape is, and when to compact; a backend owns the memory and runs the graphs. Slots 0..B-1 are the active ones.
B requests, K beams, C cache entries, S source positions, M candidates, E logit edits per beam, R rows (of B * K) that
are sampled, P rows of which the likeliest words are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.stats import DeviceStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
# What an encoder reads: token ids, or, of a model that reads no text, a matrix with a row for each position.
Source = Sequence[int] | NDArray[np.float32]

REPORTED = 20  # the likeliest words that a step graph reports per row: A, where the vocabulary has as many
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
    independent: bool  # greedy and sampling: logit rules act on logits instead of log-probabilities
    samples: bool = False  # each of its rows continues itself; else they are beams, of which one is alive at first
    wanted: tuple[int, ...] = ()  # words that it names itself: a shortlist must have them


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host adds to a step; the rest is already on the device. A backend reads the arrays before it returns
    from `launch` or `run`: the next step's may lie in the same memory. But the same object says the same again."""

    forced: Ints  # [B]: the next word of a forced prefix, or -1
    edit_index: Ints  # [B, K, E]
    edit_scale: Floats
    edit_add: Floats
    sample_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [R]: b * K + k
    # [R, 5]: uniform number, temperature, top_k (the vocabulary's size: off), top_p, min_p
    sampling: Floats = field(default_factory=lambda: np.zeros((0, 5), np.float32))
    report_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [P]

    @property
    def plain(self) -> bool:
        """Whether no request forces, edits, samples or reports anything in this step: the graph's fast path."""
        lists = self.edit_index.size + self.sample_rows.size + self.report_rows.size
        return lists == 0 and bool((self.forced < 0).all())


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the host sees of a step. The arrays are the backend's: read them before the next run."""

    tokens: Ints  # [B, K]: the beams that live on
    parents: Ints  # [B, K]
    scores: Floats  # [B, K]
    candidate_scores: Floats  # [B, M]: the best continuations, those that end among them
    candidate_tokens: Ints
    candidate_parents: Ints
    top_log_probs: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [P, A], best first
    top_tokens: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next Q tokens of some prompts, one row each. A row with fewer is padded; what is written for padding is never
    visible."""

    tokens: Ints  # [B, Q]
    starts: Ints  # [B]: how much of each prompt has been taken in before


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """What a device took for a chunk of prompts."""

    tokens: int  # of all its rows
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """By the device's own clock."""

    step_seconds: float  # of the step that was collected last
    chunks: tuple[ChunkTime, ...]  # those that it was seen to be done with since it was asked the last time


@dataclass(frozen=True, slots=True)
class Scored:
    token_log_probs: Floats  # [T]
    attention: Floats | None  # [T, S]; none without a source


class Backend(Protocol):
    """Memory is opaque to the engine: what the encoder made of one request, or the cache entries of its prompt.
    `prompts`, `grow`, `take_in`, `prefix` and `prefix_bytes` are for decoder-only models that have a prefill graph."""

    def allocate(self, slots: int, largest: Shape) -> int:
        """Reserves the arenas, zeroed, for every shape up to `largest`; returns their size in bytes."""

    def encode(self, sources: Sequence[Source]) -> list[Any]:
        """One memory per source; the caller groups sources of similar length."""

    def prompts(self, lengths: Sequence[int], known: Sequence[tuple[Any, int] | None]) -> list[Any]:
        """One memory per prompt, for so many entries; it begins with the first of the memory in `known`, where there is
        one: that many. They are taken in together."""

    def grow(self, memories: Sequence[Any], entries: int) -> bool:
        """Whether memories that were made together have room for so many entries each; where they have not, some of the
        work for it is done now, and nothing is to be taken in before it is over."""

    def take_in(self, memories: Sequence[Any], chunk: PromptChunk) -> None:
        """Computes the entries of a chunk, into memories that were made together: all of them, or some in a row."""

    def prefix(self, memory: Any, length: int) -> tuple[Any, int]:
        """The first entries of a memory as one that may be kept, and its size in bytes. Nothing is taken in behind
        them any more."""

    def prefix_bytes(self, memory: Any, length: int) -> int:
        """The size that `prefix` would say, without making one."""

    def expect(self, shape: Shape) -> bool:
        """A hint, given again and again while a long prompt is taken in: steps of this shape will come. What the first
        of them would have to wait for can be done now, a little at a time. Whether there was anything to do."""

    def resize(self, shape: Shape, rows: int) -> bool:
        """Prepares for steps of this shape, keeping slots 0..rows-1; true where data had to be laid out anew."""

    def fill(self, slot: int, memory: Any) -> Iterator[None]:
        """Copies a prompt's entries to a slot that nobody has yet, by the part: between two of them others may step,
        and slots up to this one may be laid out anew."""

    def place(self, slot: int, memory: Any, start: Start) -> None:
        """Makes the slot, which has been filled, a new request's."""

    def move(self, source: int, target: int) -> None:
        """The target slot becomes what the source slot is."""

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        """Keeps only these cache entries of a slot, in this order, at its beginning."""

    def zero(self, slot: int) -> None:
        """Wipes a slot, so that nothing of its request can reach the next one."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of the current shape."""

    def score(self, source: Source, target: Sequence[int], start_token: int) -> Scored:
        """The teacher-forced pass over one pair."""

    def score_batch(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        """The same over several, without attention: the log-probabilities of what should follow each target token."""


@runtime_checkable
class PipelinedBackend(Protocol):
    """What a backend has besides, if its steps can be asked for and waited for apart."""

    def launch(self, inputs: StepInputs) -> None:
        """Asks for a step of the current shape, and waits for nothing. At most two may be in flight."""

    def collect(self) -> StepOutputs:
        """Waits for the oldest step. Its arrays are valid until the next launch but one."""

    def forget_launches(self) -> None:
        """After a failure: nobody will collect what is in flight."""


@runtime_checkable
class TimedBackend(Protocol):
    """What a backend has besides, if `take_in` returns before the device has begun: the host's clock would put a
    chunk's time down to the step that is collected behind it."""

    def device_times(self) -> DeviceTimes:
        """Waits for nothing: of a chunk it is known when a step that was asked for later has been collected."""


@runtime_checkable
class MeasuredBackend(Protocol):
    """What a backend has besides, if its memory is a GPU's."""

    def needed_bytes(self, slots: int, largest: Shape) -> int:
        """What `allocate` and the steps after it would take, about."""

    def device_stats(self) -> DeviceStats: ...


class PooledBackend(Protocol):
    """A model that classifies or embeds: one graph, no slots."""

    def run(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
        """Every output of the graph: [rows, ...]."""
