"""Sampling by inverse CDF, at the end of a step graph, for the rows that want it.

The host lists these rows and gives each a uniform number, so the others cost nothing and nothing random happens here.
R of the B * K rows are drawn, P are reported on; V words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beamline.converters.modules.search.beam_search import Beams

# The most words that top_k and top_p look at: TensorRT's TopK ends at 3840, and a nucleus this wide is hardly a filter.
# A wider nucleus is cut here.
WIDEST = 1024
REPORTED = 20  # alternatives per row


@dataclass(frozen=True)
class Draws:
    """Which rows are samples, and how each is drawn."""

    rows: Tensor  # [R]: b * K + k
    settings: Tensor  # [R, 5]: uniform number, temperature, top_k (V: off), top_p (1: off), min_p (0: off)


def draw(log_probs: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """log_probs [B, K, V] -> the words [R], and their log-probabilities without temperature and filters. Filters act in
    the order of Hugging Face `generate`: temperature, top_k, top_p, min_p."""
    words = log_probs.shape[2]
    rows = log_probs.reshape(-1, words).index_select(0, draws.rows)  # [R, V]
    uniform, temperature, top_k, top_p, min_p = draws.settings.chunk(5, dim=1)  # [R, 1] each
    shares = (rows / temperature).softmax(-1)
    weights = torch.where(shares >= _threshold(shares, top_k, top_p, min_p), shares, 0.0)
    reached = weights.cumsum(1)
    # As many words as lie wholly below the number; one that weighs nothing is never the first above it.
    tokens = (reached <= uniform * reached[:, -1:]).sum(1, keepdim=True)
    return tokens.squeeze(1), rows.gather(1, tokens).squeeze(1)


def _threshold(shares: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R, 1]: what a word must have to stay. A tie with the last one that stays, stays too."""
    count = min(shares.shape[1], WIDEST)
    best = shares.topk(count).values  # [R, N]
    among = torch.where(torch.arange(count)[None, :] < top_k, best, 0.0)
    counted = top_k < count
    total = torch.where(counted, among.sum(1, keepdim=True), 1.0)
    before = among.cumsum(1) - among
    stays = torch.logical_and(before < top_p * total, among > 0)
    last = torch.where(stays, best, 1.0).amin(1, keepdim=True)
    filtered = torch.logical_or(counted, top_p < 1)
    return torch.maximum(torch.where(filtered, last, 0.0), min_p * best[:, :1])


def follow_draws(beams: Beams, scores: Tensor, log_probs: Tensor, draws: Draws) -> Beams:
    """The rows that are samples continue themselves with the word that was drawn, be it an end."""
    tokens, drawn = draw(log_probs, draws)
    own = torch.arange(scores.shape[1])[None, :].expand(scores.shape).reshape(-1)

    def put(values: Tensor, new: Tensor) -> Tensor:
        return values.reshape(-1).scatter(0, draws.rows, new).reshape(scores.shape)

    return Beams(
        put(beams.tokens, tokens),
        put(beams.scores, scores.reshape(-1).index_select(0, draws.rows) + drawn),
        put(beams.parents, own.index_select(0, draws.rows)),
    )


def alternatives(log_probs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest words of rows [P] and their log-probabilities: [P, A]."""
    words = log_probs.shape[2]
    best = log_probs.reshape(-1, words).index_select(0, rows).topk(min(words, REPORTED))
    return best.values, best.indices
