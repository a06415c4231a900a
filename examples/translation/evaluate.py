"""How good a model is: likelihood of the references, and BLEU and chrF of its own greedy translations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import sacrebleu
import sentencepiece
import torch
from torch import Tensor

from examples.translation.data import END, PAD, START, Batch, pad
from examples.translation.loss import projected_loss
from examples.translation.models import Model, hidden_states


@dataclass(frozen=True)
class Scores:
    valid_nll: float  # per target token, END included
    perplexity: float
    bleu: float
    chrf: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


@torch.inference_mode()
def mean_nll(model: Model, batches: Iterable[Batch]) -> float:
    nll, tokens = 0.0, 0
    for batch in batches:
        memory = model.encode(batch.source, batch.source_mask)
        hidden = hidden_states(model, memory, batch.source_mask, batch.target)
        real = batch.labels != PAD
        nll += projected_loss(hidden[real], model.output, batch.labels[real], smoothing=0.0).nll.item()
        tokens += batch.tokens
    return nll / max(1, tokens)


@torch.inference_mode()
def greedy(model: Model, source: Tensor, source_mask: Tensor, limit: int) -> list[list[int]]:
    """The likeliest token each time. It reads the whole prefix again at each step: simple, not fast."""
    answers: list[list[int]] = [[] for _ in source]
    active = torch.arange(len(source))
    memory = model.encode(source, source_mask)
    target = torch.full((len(source), 1), START)
    for _ in range(limit):
        last = hidden_states(model, memory, source_mask, target)[:, -1]
        chosen = model.output(last).argmax(-1)
        for row, token in zip(active.tolist(), chosen.tolist(), strict=True):
            if token != END:
                answers[row].append(token)
        going = chosen != END
        if not going.any():
            break
        active, memory, source_mask = active[going], memory[going], source_mask[going]
        target = torch.cat([target[going], chosen[going, None]], dim=1)
    return answers


def translate(
    model: Model, vocabulary: sentencepiece.SentencePieceProcessor, lines: list[str], batch_lines: int = 64
) -> list[str]:
    room = model.config.max_positions
    encoded = [[*ids[: room - 1], END] for ids in vocabulary.encode(lines)]
    answers = [""] * len(lines)
    order = sorted(range(len(lines)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), batch_lines):
        chosen = order[start : start + batch_lines]
        source = pad([encoded[index] for index in chosen])
        limit = min(room, 2 * source.shape[1] + 10)  # an undertrained model repeats itself for ever
        for index, ids in zip(chosen, greedy(model, source, source != PAD, limit), strict=True):
            answers[index] = vocabulary.decode(ids)
    return answers


def score(
    model: Model,
    vocabulary: sentencepiece.SentencePieceProcessor,
    batches: Iterable[Batch],
    sources: list[str],
    references: list[str],
) -> Scores:
    nll = mean_nll(model, batches)
    answers = translate(model, vocabulary, sources)
    return Scores(
        valid_nll=nll,
        perplexity=math.exp(min(nll, 50.0)),
        bleu=sacrebleu.corpus_bleu(answers, [references]).score,
        chrf=sacrebleu.corpus_chrf(answers, [references]).score,
    )
