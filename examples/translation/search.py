"""Greedy and beam search in PyTorch, over whole prefixes: simple, not fast. The rules are those of Hugging Face
`generate`, which are the server's: what is measured here is what is served.
"""

from __future__ import annotations

import torch
from torch import Tensor

from examples.translation.data import END, START
from examples.translation.models import Model, hidden_states

DEAD = -1e9  # the score of a beam that nobody continues


@torch.inference_mode()
def greedy(model: Model, source: Tensor, source_mask: Tensor, limits: list[int]) -> list[list[int]]:
    """The likeliest token each time. A limit counts START, as `max_length` does."""
    answers: list[list[int]] = [[] for _ in source]
    active = torch.arange(len(source))
    memory = model.encode(source, source_mask)
    target, most = torch.full((len(source), 1), START), torch.tensor(limits)
    while len(active):
        last = hidden_states(model, memory, source_mask, target)[:, -1]
        chosen = model.output(last).argmax(-1)
        for row, token in zip(active.tolist(), chosen.tolist(), strict=True):
            if token != END:
                answers[row].append(token)
        going = (chosen != END) & (target.shape[1] + 1 < most[active])
        active, memory, source_mask = active[going], memory[going], source_mask[going]
        target = torch.cat([target[going], chosen[going, None]], dim=1)
    return answers


class Finished:
    """The best hypotheses of a sentence that have ended."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.best: list[tuple[float, list[int]]] = []

    def add(self, total: float, tokens: list[int]) -> None:
        self.best.append((total / len(tokens), tokens))
        self.best = sorted(self.best, key=lambda found: -found[0])[: self.width]

    def beyond(self, total: float, length: int) -> bool:
        """Whether a beam that has come so far can no longer be among them."""
        return len(self.best) == self.width and total / length <= self.best[-1][0]

    def answer(self) -> list[int]:
        return [token for token in self.best[0][1] if token != END]


@torch.inference_mode()
def beam_search(model: Model, source: Tensor, source_mask: Tensor, limits: list[int], width: int) -> list[list[int]]:
    """The best of each sentence by mean log-probability, its end included."""
    finished = [Finished(width) for _ in source]
    active = list(range(len(source)))
    beams = torch.arange(len(source)).repeat_interleave(width)
    memory, mask = model.encode(source, source_mask)[beams], source_mask[beams]
    target = torch.full((len(beams), 1), START)
    scores = torch.tensor([0.0] + [DEAD] * (width - 1)).repeat(len(source), 1)  # [sentences, width]
    while active:
        length = target.shape[1]  # of a hypothesis that ends with this step, without START
        log_probs = model.output(hidden_states(model, memory, mask, target)[:, -1]).log_softmax(-1)
        totals = (scores[:, :, None] + log_probs.view(len(active), width, -1)).flatten(1)
        best = totals.topk(2 * width)
        rows, tokens = best.indices // log_probs.shape[1], best.indices % log_probs.shape[1]
        still, parents, words, kept = list[int](), list[int](), list[int](), list[list[float]]()
        for place, sentence in enumerate(active):
            at_limit = length + 1 >= limits[sentence]
            live: list[tuple[float, int, int]] = []
            ranked = zip(best.values[place].tolist(), rows[place].tolist(), tokens[place].tolist(), strict=True)
            for rank, (total, row, token) in enumerate(ranked):
                parent = place * width + row
                if rank < width and (token == END or at_limit):
                    finished[sentence].add(total, [*target[parent, 1:].tolist(), token])
                elif token != END and len(live) < width:
                    live.append((total, parent, token))
            if at_limit or finished[sentence].beyond(live[0][0], length):
                continue
            still.append(sentence)
            kept.append([total for total, _, _ in live])
            parents += [parent for _, parent, _ in live]
            words += [token for _, _, token in live]
        active = still
        if active:
            chosen = torch.tensor(parents)
            memory, mask, scores = memory[chosen], mask[chosen], torch.tensor(kept)
            target = torch.cat([target[chosen], torch.tensor(words)[:, None]], dim=1)
    return [each.answer() for each in finished]
