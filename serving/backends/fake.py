"""A device that computes nothing: every step takes exactly the time that it was set to, and the answer is an
echo of the input.

Tests and the load tester rely on it: what they measure of the server has a known right answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from beamline.serving.contract.backend import (
    REPORTED,
    Floats,
    PromptChunk,
    Scored,
    Shape,
    Source,
    Start,
    StepInputs,
    StepOutputs,
)
from beamline.serving.contract.manifest import (
    DecodingDefaults,
    File,
    Graphs,
    Limits,
    Manifest,
    Tokenizers,
    Vocabulary,
    Weights,
)

VOCABULARY = 259  # pad, start and end, then the 256 bytes
_MOST = np.float32(-0.1)  # the log-probability of the word that the echo wants
_REST = np.float32(-10.0)


def fake_manifest(name: str = "fake", task: Literal["translate", "generate"] = "translate") -> Manifest:
    nothing = File(file="none", sha256="")
    encoder, prefill = (nothing, None) if task == "translate" else (None, nothing)
    return Manifest(
        name=name,
        version=1,
        task=task,
        family="fake",
        graphs=Graphs(encoder=encoder, prefill=prefill, step=nothing, score=nothing),
        weights=Weights(file="none", sha256="", bytes=0),
        tokenizers=Tokenizers(source=nothing, target=nothing),
        state=(),
        vocabulary=Vocabulary(
            source_size=VOCABULARY, target_size=VOCABULARY, pad_id=0, eos_ids=(2,), decoder_start_id=1
        ),
        limits=Limits(max_source_length=4096, max_target_length=4098, max_beam_size=16),
        defaults=DecodingDefaults(beam_size=1, max_length=4098),
    )


@dataclass(slots=True)
class _Row:
    source: tuple[int, ...]
    width: int
    samples: bool = False
    position: int = 0
    total: float = 0.0  # the best living beam's score


class FakeBackend:
    def __init__(self, manifest: Manifest, step_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.manifest = manifest
        self.step_seconds = step_seconds
        self._sleep = sleep
        self._rows: list[_Row] = []
        self._shape = Shape(0, 0, 0, 0)

    def allocate(self, slots: int, largest: Shape) -> int:
        self._rows = [_Row((), 1) for _ in range(slots)]
        return 0

    def encode(self, sources: Sequence[Source]) -> list[tuple[int, ...]]:
        return [tuple(source) for source in sources]

    def prompts(self, lengths: Sequence[int], known: Sequence[tuple[list[int], int] | None]) -> list[list[int]]:
        prefixes = [() if each is None else each[0][: each[1]] for each in known]
        return [[*prefix, *[0] * length][:length] for length, prefix in zip(lengths, prefixes, strict=True)]

    def grow(self, memories: Sequence[list[int]], entries: int) -> bool:
        return True

    def take_in(self, memories: Sequence[list[int]], chunk: PromptChunk) -> None:
        for memory, tokens, start in zip(memories, chunk.tokens.tolist(), chunk.starts.tolist(), strict=True):
            memory[:] = [*memory[:start], *tokens, *memory[start + len(tokens) :]][: len(memory)]

    def prefix(self, memory: Sequence[int], length: int) -> tuple[list[int], int]:
        return list(memory[:length]), self.prefix_bytes(memory, length)

    def prefix_bytes(self, memory: Sequence[int], length: int) -> int:
        return 8 * length

    def resize(self, shape: Shape, rows: int) -> bool:
        self._shape = shape
        return False

    def expect(self, shape: Shape) -> bool:
        return False

    def fill(self, slot: int, memory: Sequence[int]) -> Iterator[None]:
        return iter(())

    def place(self, slot: int, memory: Sequence[int], start: Start) -> None:
        source = tuple(memory)
        if self.manifest.task == "generate":  # a prompt's last token comes with the first step
            source = (*source, start.token)
        self._rows[slot] = _Row(source, start.width, start.samples)

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        pass

    def zero(self, slot: int) -> None:
        self._rows[slot] = _Row((), 1)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Each request wants the next word of its source, and after the last one the end."""
        if self.step_seconds:
            self._sleep(self.step_seconds)
        batch, beams = self._shape.batch, self._shape.beams
        eos = self.manifest.vocabulary.eos_ids[0]
        count = self.manifest.candidates_per_beam * beams
        scores = np.empty((batch, count), np.float32)
        tokens = np.tile(np.arange(3, count + 3), (batch, 1))  # lesser words, behind the wanted one
        for number, row in enumerate(self._rows[:batch]):
            tokens[number, 0] = row.source[row.position] if row.position < len(row.source) else eos
            scores[number] = row.total + _REST - np.arange(count)
            scores[number, 0] = row.total + _MOST
        # All candidates come from the best beam; the next beams are the best of those that don't end.
        ends = (tokens[:, :1] == eos).astype(np.int64)
        pick = ends + np.arange(beams)
        next_scores = np.take_along_axis(scores, pick, 1)
        forced = inputs.forced[:, None]
        next_scores[:, 0] = np.where(forced[:, 0] >= 0, [row.total for row in self._rows[:batch]], next_scores[:, 0])
        for number, row in enumerate(self._rows[:batch]):
            row.position += 1
            row.total = float(next_scores[number, 0])
        parents = np.zeros((batch, count), np.int64)
        next_tokens = np.where(forced >= 0, forced, np.take_along_axis(tokens, pick, 1))
        for number, row in enumerate(self._rows[:batch]):
            if row.samples:  # all of them say the same, the end too
                next_tokens[number], next_scores[number] = tokens[number, 0], scores[number, 0]
        reported = (len(inputs.report_rows), REPORTED)
        return StepOutputs(
            tokens=next_tokens,
            parents=parents[:, :beams],
            scores=next_scores,
            top_log_probs=np.tile(_MOST + _REST * np.arange(REPORTED, dtype=np.float32), (reported[0], 1)),
            top_tokens=np.broadcast_to(np.arange(REPORTED), reported),
            candidate_scores=scores,
            candidate_tokens=tokens,
            candidate_parents=parents,
        )

    def score(self, source: Source, target: Sequence[int], start_token: int) -> Scored:
        """Each word comes from the one at its own place."""
        attention = np.zeros((len(target), len(source)), np.float32)
        for row in range(len(target)):
            attention[row, min(row, len(source) - 1)] = 1
        return Scored(np.full(len(target), _MOST, np.float32), attention)

    def score_batch(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        return [np.full(len(row), _MOST, np.float32) for row in labels]
