"""The reference Transformer as an `EncoderDecoder`: its step attends over the cached tree."""

from __future__ import annotations

from torch import Tensor, nn

from beamline.converters.modules.transformer import CrossAttention, SelfAttention, Transformer, visible_to_all
from beamline.converters.modules.tree import Tree
from beamline.serving.contract.manifest import StateKind, StateTensor


class TransformerSteps(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        # The layer before the last aligns best; a decoder of one layer has no choice.
        self.alignment_layer = max(0, model.config.decoder_layers - 2)

    def state_tensors(self) -> list[StateTensor]:
        config = self.model.config
        heads, width = config.heads, config.d_model // config.heads
        layers = range(config.decoder_layers)
        memory = [StateTensor(name="source_mask", kind=StateKind.MEMORY, dtype="bool", shape=("B", "S"))]
        memory += [
            StateTensor(
                name=f"cross_{part}_{layer}",
                kind=StateKind.MEMORY,
                dtype="float32",
                shape=("B", heads, "S", width),
            )
            for layer in layers
            for part in ("key", "value")
        ]
        caches = [
            StateTensor(
                name=f"cache_{part}_{layer}",
                kind=StateKind.CACHE,
                dtype="float32",
                shape=("B", heads, "C", width),
            )
            for layer in layers
            for part in ("key", "value")
        ]
        return memory + caches

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        hidden = self.model.encode(source, source_mask)
        projected = [layer.cross_attention.project_memory(hidden) for layer in self.model.decoder_layers]
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
        caches: list[Tensor] = []

        x = self.model.target_embedding(tokens, positions[:, None])
        for number, layer in enumerate(self.model.decoder_layers):

            def self_attend(y: Tensor, number: int = number, attention: SelfAttention = layer.attention) -> Tensor:
                query, key, value = attention.project(y)
                key = tree.append(states[2 * number], key)
                value = tree.append(states[2 * number + 1], value)
                caches.extend((key, value))
                return attention.attend(query, key, value, tree.mask)

            def cross_attend(
                y: Tensor, number: int = number, attention: CrossAttention = layer.cross_attention
            ) -> Tensor:
                return attention(y, crosses[2 * number], crosses[2 * number + 1], source_visible)  # type: ignore[no-any-return]

            x = layer(x, self_attend, cross_attend)
        return self.model.output(self.model.decoder_norm(x)), tuple(caches)

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.score(source, source_mask, target, self.alignment_layer)
