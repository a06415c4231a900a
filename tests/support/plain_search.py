"""Greedy and beam search as plainly as possible, over any function of whole sequences: no tree, no cache, no batching.

The algorithm is Hugging Face's, as in `tests/serving/engine/test_search_properties.py`; here the model is a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from beamline.serving.engine.options import DecodingOptions

LogProbs = Callable[[list[list[int]]], Tensor]  # sequences of one length, start token first -> [sequences, V]


@dataclass(frozen=True)
class Found:
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    score: float


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.log_probs)


def plain_search(model: LogProbs, options: DecodingOptions, start: int, eos: int) -> list[Found]:
    width = options.beam_size
    running, finished = [_Beam((), ())], list[Found]()
    for length in range(1, options.max_length):
        rows = model([[start, *beam.tokens] for beam in running])
        best = rows.topk(min(2 * width, rows.shape[1]))
        candidates = [
            _Beam((*beam.tokens, token), (*beam.log_probs, value))
            for beam, values, tokens in zip(running, best.values.tolist(), best.indices.tolist(), strict=True)
            for value, token in zip(values, tokens, strict=True)
        ]
        candidates.sort(key=lambda beam: -beam.total)
        candidates = candidates[: 2 * width]
        at_limit = length + 1 >= options.max_length
        finished += [
            Found(beam.tokens, beam.log_probs, beam.total / length**options.length_penalty)
            for beam in candidates[:width]
            if beam.tokens[-1] == eos or at_limit
        ]
        finished = sorted(finished, key=lambda found: -found.score)[:width]
        running = [beam for beam in candidates if beam.tokens[-1] != eos][:width]
        if at_limit or (len(finished) == width and _nothing_better(running, finished, length, options)):
            break
    return finished


def _nothing_better(running: list[_Beam], finished: list[Found], length: int, options: DecodingOptions) -> bool:
    return options.beam_size == 1 or running[0].total / length**options.length_penalty <= finished[-1].score


def teacher_forced(original: Callable[[Tensor, Tensor, Tensor], Tensor], source: list[int]) -> LogProbs:
    """The last position's log-probabilities, by the model as PyTorch runs it."""

    @torch.no_grad()
    def log_probs(sequences: list[list[int]]) -> Tensor:
        ids = torch.tensor([source]).expand(len(sequences), -1)
        logits = original(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor(sequences))
        return logits[:, -1].log_softmax(-1)

    return log_probs
