"""The original PyTorch model in a plain beam search, without caches and without batching."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from beamline.converters.certificate.graph_runner import Beams, Case, Source

if TYPE_CHECKING:
    from beamline.converters.tasks.generation import LoadedModel


def log_probs(loaded: LoadedModel, source: Source, targets: Sequence[Sequence[int]]) -> torch.Tensor:
    """[targets, T, V], by the original, one source for all."""
    given = torch.tensor([list(target) for target in targets])
    with torch.no_grad():
        if loaded.task == "generate":
            logits = loaded.original(given)
        else:
            ids = torch.from_numpy(np.stack([np.asarray(source)] * len(targets)))
            logits = loaded.original(ids, torch.ones(ids.shape[:2], dtype=torch.bool), given)
    return logits.float().log_softmax(-1)


def without_forbidden(loaded: LoadedModel, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [rows, V] without the words that the graph itself forbids. There are some only where
    log-probabilities are renormalised."""
    if not loaded.forbidden:
        return rows
    rows[:, list(loaded.forbidden)] = -torch.inf
    return rows.log_softmax(-1)


def plain_beams(loaded: LoadedModel, case: Case, width: int, steps: int) -> tuple[Beams, float]:
    """Beam search without ends: the living beams after so many steps, and by how much the closest decision was made."""
    eos = set(loaded.vocabulary.eos_ids)
    beams: list[tuple[tuple[int, ...], float]] = [(case.prompt, 0.0)]
    margin = np.inf
    for _ in range(steps):
        last = without_forbidden(loaded, log_probs(loaded, case.source, [sequence for sequence, _ in beams])[:, -1])
        top = last.topk(min(2 * width + len(eos) * width + 1, last.shape[1]))
        extended = [
            ((*sequence, token), score + value)
            for (sequence, score), values, tokens in zip(beams, top.values.tolist(), top.indices.tolist(), strict=True)
            for value, token in zip(values, tokens, strict=True)
            if token not in eos
        ]
        extended.sort(key=lambda beam: -beam[1])
        closest = min(a[1] - b[1] for a, b in pairwise(extended[: width + 1]))
        margin = min(margin, closest)
        beams = extended[:width]
    return Beams([sequence for sequence, _ in beams], np.array([score for _, score in beams], np.float32)), margin
