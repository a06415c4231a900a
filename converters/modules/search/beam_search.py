"""One step of beam search, as small tensor functions that end every step graph.

The semantics are those of Hugging Face `generate`. What needs memory (finished hypotheses, length penalty, stop
rules) is the host's; see `serving/engine/search/beam_search.py`.
B requests, K beams, V words, M = candidates per request, E edits per beam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEAD = -1e9  # the score of a beam that does not exist; finite, because -inf - -inf is not a number


@dataclass(frozen=True)
class Edits:
    """A short sparse list per beam: value -> sign rule with `scale`, then + `add`."""

    index: Tensor  # [B, K, E]
    scale: Tensor  # [B, K, E]: multiplies a negative value, divides a positive one; 1 does nothing
    add: Tensor  # [B, K, E]: -inf forbids a word

    def apply(self, values: Tensor, rows: Tensor) -> Tensor:
        """values [B, K, V]; only to the requests where rows [B] is true."""
        old = values.gather(2, self.index)
        new = torch.where(old < 0, old * self.scale, old / self.scale) + self.add
        return values.scatter(2, self.index, torch.where(rows[:, None, None], new, old))


@dataclass(frozen=True)
class Candidates:
    """The M best continuations of each request, best first: all [B, M]."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor


@dataclass(frozen=True)
class Beams:
    """The K beams that live on: all [B, K]."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor


def forbid(values: Tensor, words: tuple[int, ...]) -> Tensor:
    """values [B, K, V] without the words that a model never says."""
    if not words:
        return values
    index = torch.tensor(words)[None, None, :].expand(*values.shape[:2], -1)
    return values.scatter(2, index, -torch.inf)


def log_probabilities(
    logits: Tensor, edits: Edits, independent: Tensor, renormalise: bool, forbidden: tuple[int, ...] = ()
) -> Tensor:
    """[B, K, V]. The rules act on logits where rows are independent (greedy, sampling), and on log-probabilities,
    without renormalising unless the model asks for it, in beam search."""
    edited = edits.apply(logits, independent).log_softmax(-1)
    edited = forbid(edits.apply(edited, ~independent), forbidden)
    return edited.log_softmax(-1) if renormalise else edited


def best_candidates(log_probs: Tensor, scores: Tensor, per_beam: int) -> Candidates:
    """The best per_beam * K continuations of the whole request. Two small selections instead of one over K * V."""
    batch, beams, _ = log_probs.shape
    count = per_beam * beams
    values, tokens = log_probs.topk(count, dim=2)  # [B, K, M]
    totals = (values + scores[:, :, None]).reshape(batch, beams * count)
    best, index = totals.topk(count, dim=1)  # [B, M]
    parents = torch.div(index, count, rounding_mode="trunc")  # one operator; // would be eight
    return Candidates(best, tokens.reshape(batch, beams * count).gather(1, index), parents)


def next_beams(candidates: Candidates, eos_ids: tuple[int, ...], width: Tensor, beams: int) -> Beams:
    """The best K candidates that don't end. Where a request has fewer beams than the batch, the surplus is dead."""
    ends = torch.zeros_like(candidates.tokens, dtype=torch.bool)
    for eos_id in eos_ids:
        ends = torch.logical_or(ends, candidates.tokens == eos_id)
    alive = torch.where(ends, candidates.scores + DEAD, candidates.scores)
    scores, pick = alive.topk(beams, dim=1)
    surplus = torch.arange(beams)[None, :] >= width[:, None]
    return Beams(
        candidates.tokens.gather(1, pick),
        torch.where(surplus, DEAD, scores),
        candidates.parents.gather(1, pick),
    )


def force(beams: Beams, scores: Tensor, forced: Tensor) -> Beams:
    """Where forced [B] is a word (not -1), every beam continues with it, at no cost."""
    is_forced = (forced >= 0)[:, None]
    own = torch.arange(scores.shape[1])[None, :].expand(scores.shape)
    return Beams(
        torch.where(is_forced, forced[:, None], beams.tokens),
        torch.where(is_forced, scores, beams.scores),
        torch.where(is_forced, own, beams.parents),
    )
