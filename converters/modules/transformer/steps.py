"""Transformers token by token: their steps attend over the tree that the KV cache holds."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from beamline.converters.modules.search.tree import Tree
from beamline.converters.modules.transformer.attention import CrossAttention, attend, visible_to_all
from beamline.converters.modules.transformer.config import StackConfig
from beamline.converters.modules.transformer.decoder_only import DecoderOnlyTransformer
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.relative import Masks
from beamline.serving.contract.manifest import StateKind, StateTensor

Shape = tuple[Literal["B"], int, Literal["C", "S"], int]


class CachedAttention:
    """Self-attention of one step: appends each layer's keys and values to its cache, and attends along the tree."""

    def __init__(self, tree: Tree, states: tuple[Tensor, ...], masks: Masks, softcap: float | None = None) -> None:
        self._tree, self._states, self._masks, self._softcap = tree, states, masks, softcap
        self.caches: list[Tensor] = []  # with this step's entries: keys and values, layer by layer

    def __call__(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = self._tree.append(self._states[2 * number], key)
        value = self._tree.append(self._states[2 * number + 1], value)
        self.caches.extend((key, value))
        return attend(query, key, value, self._masks[number], self._softcap)


def cache_tensors(config: StackConfig) -> list[StateTensor]:
    heads, width = config.attention.kv_heads, config.attention.head_width
    return _pairs("cache", StateKind.CACHE, ("B", heads, "C", width), config.layers)


def _pairs(name: str, kind: StateKind, shape: Shape, layers: int) -> list[StateTensor]:
    """A tensor of keys and one of values per layer."""
    return [
        StateTensor(name=f"{name}_{part}_{layer}", kind=kind, dtype="float32", shape=shape)
        for layer in range(layers)
        for part in ("key", "value")
    ]


class EncoderDecoderSteps(nn.Module):
    """As an `EncoderDecoder`."""

    def __init__(self, model: EncoderDecoderTransformer) -> None:
        super().__init__()
        self.model = model
        # The layer before the last aligns best; a decoder of one layer has no choice.
        self.alignment_layer = max(0, model.architecture.decoder.layers - 2)

    def state_tensors(self) -> list[StateTensor]:
        decoder = self.model.architecture.decoder
        cross = decoder.cross_attention
        assert cross is not None
        shape: Shape = ("B", cross.kv_heads, "S", cross.head_width)
        mask = StateTensor(name="source_mask", kind=StateKind.MEMORY, dtype="bool", shape=("B", "S"))
        return [mask, *_pairs("cross", StateKind.MEMORY, shape, decoder.layers), *cache_tensors(decoder)]

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        hidden = self.model.encode(source, source_mask)
        projected = [cross.project_memory(hidden) for cross in self.model.cross_attentions]
        return tuple(tensor for pair in projected for tensor in pair)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        source_mask, crosses = memory[0], memory[1:]
        source_visible = visible_to_all(source_mask, tokens)

        def cross_attend(number: int, cross: CrossAttention, y: Tensor) -> Tensor:
            return cross(y, crosses[2 * number], crosses[2 * number + 1], source_visible)  # type: ignore[no-any-return]

        attention = CachedAttention(tree, states, Masks(self.model.decoder_bias, tree.distances, tree.mask))
        embedding = self.model.target_embedding
        places = positions[:, None]  # all beams of a request stand at the same place
        angles = embedding.angles(tokens, places)
        x = self.model.decoder.run(embedding(tokens, places), attention, angles, cross_attend)
        return self.model.output(self.model.decoder_norm(x)), tuple(attention.caches)

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.score(source, source_mask, target, self.alignment_layer)


class DecoderOnlySteps(nn.Module):
    """As a `PromptReader`."""

    def __init__(self, model: DecoderOnlyTransformer) -> None:
        super().__init__()
        self.model = model

    def state_tensors(self) -> list[StateTensor]:
        return cache_tensors(self.model.architecture.decoder)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, caches = self._advance(tokens, positions[:, None], tree, states)
        return self.model.logits(hidden), caches

    def prefill(self, tokens: Tensor, positions: Tensor, tree: Tree, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Padding may stand behind the last place that there is.
        last = self.model.architecture.decoder.max_positions - 1
        places = (positions[:, None] + torch.arange(tokens.shape[1])).clamp(max=last)
        return self._advance(tokens, places, tree, states)[1]

    def _advance(
        self, tokens: Tensor, places: Tensor, tree: Tree, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What enters the last norm, and the caches with these tokens in them."""
        decoder, embedding = self.model.architecture.decoder, self.model.embedding
        masks = Masks(self.model.bias, tree.distances, tree.mask, decoder.windows)
        attention = CachedAttention(tree, states, masks, decoder.attention.softcap)
        x = self.model.decoder.run(embedding(tokens, places), attention, embedding.angles(tokens, places))
        return x, tuple(attention.caches)

    def score(self, target: Tensor) -> Tensor:
        return self.model(target)  # type: ignore[no-any-return]
