"""What is exported, and the names of its inputs and outputs: the step graph of every model, and those around it.

A family gives an `EncoderDecoder` or a `LanguageModel` (`protocols.py`); the graphs are the same for all of them.

encoder   a source -> what a request keeps of it
prefill   a chunk of the prompt -> its entries in the caches; no logits, and nothing after the last layer's keys
step      tokens, tree and caches -> the same for the next step, and the best candidates
score     a source and a target, or a text -> the log-probabilities of its tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from beamline.converters.modules.protocols import Decoder, EncoderDecoder, LanguageModel, PromptReader
from beamline.converters.modules.search.beam_search import Edits, best_candidates, force, log_probabilities, next_beams
from beamline.converters.modules.search.sampling import Draws, alternatives, follow_draws
from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateKind

PREFILL_INPUTS = ("tokens", "positions", "write_index", "visible")
STEP_INPUTS = (
    "tokens",
    "positions",
    "write_index",
    "scores",
    "ancestry",
    "width",
    "independent",
    "forced",
    "edit_index",
    "edit_scale",
    "edit_add",
    "sample_rows",
    "sampling",
    "report_rows",
)
STEP_OUTPUTS = (
    "next_tokens",
    "next_positions",
    "next_write_index",
    "next_scores",
    "next_ancestry",
    "parents",
    "candidate_scores",
    "candidate_tokens",
    "candidate_parents",
    "top_log_probs",
    "top_tokens",
)


@dataclass(frozen=True)
class SearchConstants:
    """What the search needs to know of the model, fixed in its graph."""

    eos_ids: tuple[int, ...]
    candidates_per_beam: int
    renormalise: bool  # log-probabilities after the rules have edited them
    forbidden: tuple[int, ...] = ()  # words that are never produced; only with renormalise


class EncoderGraph(nn.Module):
    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        return self.model.encode(source, source_mask)


class StepGraph(nn.Module):
    def __init__(self, model: Decoder, constants: SearchConstants) -> None:
        super().__init__()
        self.model = model
        self.constants = constants
        tensors = model.state_tensors()
        self.memory_count = sum(tensor.kind is StateKind.MEMORY for tensor in tensors)
        self.kinds = [tensor.kind for tensor in tensors if tensor.kind is not StateKind.MEMORY]

    def forward(
        self,
        tokens: Tensor,  # [B, K]
        positions: Tensor,  # [B]
        write_index: Tensor,  # [B]
        scores: Tensor,  # [B, K]
        ancestry: Tensor,  # [B, K, C]
        width: Tensor,  # [B]: how many of the K beams are this request's
        independent: Tensor,  # [B]: greedy and sampling; rules act on logits
        forced: Tensor,  # [B]: the next word of a forced prefix, or -1
        edit_index: Tensor,  # [B, K, E]
        edit_scale: Tensor,
        edit_add: Tensor,
        sample_rows: Tensor,  # [R]: the rows, of B * K, that are drawn
        sampling: Tensor,  # [R, 5]: how
        report_rows: Tensor,  # [P]: the rows of which the likeliest words are wanted
        state: tuple[Tensor, ...],  # memory, then caches and recurrent states
    ) -> tuple[Tensor, ...]:
        memory, states = state[: self.memory_count], state[self.memory_count :]
        tree = Tree.grow(ancestry, write_index)
        logits, states = self.model.step(tokens, positions, tree, memory, states)

        edits = Edits(edit_index, edit_scale, edit_add)
        constants = self.constants
        log_probs = log_probabilities(logits, edits, independent, constants.renormalise, constants.forbidden)
        candidates = best_candidates(log_probs, scores, self.constants.candidates_per_beam)
        beams = next_beams(candidates, self.constants.eos_ids, width, tokens.shape[1])
        beams = force(beams, scores, forced)
        beams = follow_draws(beams, scores, log_probs, Draws(sample_rows, sampling))
        top_log_probs, top_tokens = alternatives(log_probs, report_rows)

        return (
            beams.tokens,
            positions + 1,
            write_index + width,
            beams.scores,
            tree.ancestry_of(beams.parents),
            beams.parents,
            candidates.scores,
            candidates.tokens,
            candidates.parents,
            top_log_probs,
            top_tokens,
            *(self.follow(kind, state, beams.parents) for kind, state in zip(self.kinds, states, strict=True)),
        )

    @staticmethod
    def follow(kind: StateKind, state: Tensor, parents: Tensor) -> Tensor:
        """A cache stays where it is; a recurrent state [B, K, ...] goes with its beam."""
        if kind is StateKind.CACHE:
            return state
        index = parents.reshape(*parents.shape, *(1 for _ in state.shape[2:])).expand(state.shape)
        return state.gather(1, index)


class ScoreGraph(nn.Module):
    """The teacher-forced pass: what the model thinks of a given target."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """target [B, T] begins with the start token; labels [B, T] is what should follow each of its words."""
        logits, attention = self.model.score(source, source_mask, target)
        chosen = logits.log_softmax(-1).gather(2, labels[:, :, None])
        return torch.squeeze(chosen, 2), attention


class PrefillGraph(nn.Module):
    def __init__(self, model: PromptReader) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,  # [B, Q]
        positions: Tensor,  # [B]: of the first of these tokens
        write_index: Tensor,  # [B]
        visible: Tensor,  # [B, Q, C]: the entries that a token sees, its own included
        state: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        return self.model.prefill(tokens, positions, Tree(write_index, visible), state)


class TextScoreGraph(nn.Module):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, labels: Tensor) -> Tensor:
        """labels [B, T] is what should follow each token of target [B, T]."""
        chosen = self.model.score(target).log_softmax(-1).gather(2, labels[:, :, None])
        return torch.squeeze(chosen, 2)
