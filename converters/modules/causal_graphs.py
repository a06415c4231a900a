"""The graphs of a language model: a step like every other model's, and around it what only it has.

prefill   a piece of the prompt -> its entries in the caches; no logits, and nothing after the last layer's keys
score     a text -> the log-probabilities of its tokens
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from beamline.converters.modules.causal import CausalAttention, CausalTransformer
from beamline.converters.modules.graphs import Decoder
from beamline.converters.modules.tree import Tree
from beamline.serving.contract.manifest import StateKind, StateTensor

PREFILL_INPUTS = ("tokens", "positions", "write_index", "visible")


class LanguageModel(Decoder, Protocol):
    """What a family without an encoder gives. It has no memory tensors."""

    def score(self, target: Tensor) -> Tensor:
        """target [B, T], from the text's beginning -> logits [B, T, V]"""


@runtime_checkable
class PromptReader(LanguageModel, Protocol):
    """One that takes many tokens of a prompt at once. Others are fed token by token, in forced steps."""

    def prefill(self, tokens: Tensor, positions: Tensor, tree: Tree, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """tokens [B, Q], from position positions [B] on -> the caches, appended to."""


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


class CausalSteps(nn.Module):
    """The decoder-only Transformer as a `PromptReader`."""

    def __init__(self, model: CausalTransformer) -> None:
        super().__init__()
        self.model = model

    def state_tensors(self) -> list[StateTensor]:
        config = self.model.config
        return [
            StateTensor(
                name=f"cache_{part}_{layer}",
                kind=StateKind.CACHE,
                dtype="float32",
                shape=("B", config.kv_heads, "C", config.head_width),
            )
            for layer in range(config.layers)
            for part in ("key", "value")
        ]

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        places = positions[:, None].expand(-1, tokens.shape[1])  # all beams stand at the same place
        hidden, caches = self._advance(tokens, places, tree, states)
        return self.model.output(self.model.norm(hidden)), caches

    def prefill(self, tokens: Tensor, positions: Tensor, tree: Tree, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Padding may stand behind the last place that there is.
        last = self.model.config.max_positions - 1
        places = (positions[:, None] + torch.arange(tokens.shape[1])).clamp(max=last)
        return self._advance(tokens, places, tree, states)[1]

    def _advance(
        self, tokens: Tensor, places: Tensor, tree: Tree, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What enters the last norm, and the caches with these tokens in them."""
        caches: list[Tensor] = []
        x, angles = self.model.embed(tokens, places)
        for number, layer in enumerate(self.model.causal_layers):

            def attend(
                query: Tensor,
                key: Tensor,
                value: Tensor,
                number: int = number,
                attention: CausalAttention = layer.attention,
            ) -> Tensor:
                key = tree.append(states[2 * number], key)
                value = tree.append(states[2 * number + 1], value)
                caches.extend((key, value))
                return attention.mix(query, key, value, tree.mask)

            x = layer(x, angles, attend)
        return x, tuple(caches)

    def score(self, target: Tensor) -> Tensor:
        return self.model(target)  # type: ignore[no-any-return]
