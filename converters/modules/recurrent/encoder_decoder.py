"""The reference recurrent encoder-decoder: trained as it is, and the shape that every recurrent loader maps onto.

    source -> embedding -> encoder layers -> memory, and through a bridge the decoder's first states
    target -> embedding -> decoder steps (cells, attention) -> readout -> output

Shapes in comments: B requests, S source positions, T target positions, d what the output projection gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.initialization import reset
from beamline.converters.modules.loop import over_time
from beamline.converters.modules.recurrent.cells import EncoderLayer, RunLayer, State, read_layers, reversed_places
from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.decoder import Bridge, Decoder, Memory

__all__ = ["Memory", "Recurrent", "RecurrentConfig"]


class Recurrent(nn.Module):
    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        target = nn.Embedding(config.target_vocab_size, config.embedding_width)
        shared = config.share_embeddings
        self.target_embedding = target
        self.source_embedding: nn.Module
        if config.source_features:
            projected = nn.Linear(config.source_features, config.embedding_width)
            self.source_embedding = projected if config.feature_projection else nn.Identity()
        else:
            words = nn.Embedding(config.source_vocab_size, config.embedding_width)
            self.source_embedding = target if shared else words
        self.encoder = nn.ModuleList(
            EncoderLayer(config, config.encoder_input(layer), config.directions(layer))
            for layer in range(config.encoder_layers)
        )
        self.bridge = Bridge(config)
        self.decoder = Decoder(config)
        self.output = nn.Linear(config.hidden_width, config.target_vocab_size, bias=config.output_bias)
        self.dropout = nn.Dropout(config.dropout)
        reset(self, config.embedding_width)
        if config.tie_output:
            self.output.weight = target.weight

    def encode(self, source: Tensor, source_mask: Tensor, layers: Sequence[RunLayer] | None = None) -> Memory:
        """source [B, S], or features [B, S, f]; source_mask [B, S] (true where there is something; sources begin at the
        left). `layers` may compute the same in another way."""
        config = self.config
        lengths = source_mask.sum(1)
        places = reversed_places(lengths, source.shape[1]) if config.reverse_source else None
        x = self.dropout(self.source_embedding(source if places is None else source.gather(1, places)))
        stack = layers or cast(list[RunLayer], list(self.encoder))
        x, last = read_layers(config, stack, x, lengths, self.dropout)
        return self._remember(x, last, places, source_mask)

    def _remember(self, x: Tensor, last: Sequence[State], places: Tensor | None, source_mask: Tensor) -> Memory:
        mean = torch.where(source_mask[:, :, None], x, 0.0).sum(1) / source_mask.sum(1, keepdim=True)
        start = self.bridge(last, mean)
        if self.config.input_feeding:
            start = (*start, x.new_zeros(x.shape[0], self.config.fed_width))
        attention = self.decoder.attention
        if attention is None:
            return Memory(start, context=last[-1][0] if self.config.fixed_context else None)
        if places is not None:  # a place of the memory is a place of the source, whichever way it was read
            x = x.gather(1, places[:, :, None].expand(x.shape))
        return Memory(start, x, attention.keys(x) if attention.projects_keys else None)

    def decode(
        self, memory: Memory, source_mask: Tensor, target: Tensor, attention_of: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A whole target: what the output projection gets [B, T, d], and, if `attention_of` is given, the attention
        [B, T, S]: there is only one to ask for."""
        embedded = self.dropout(self.target_embedding(target))
        wanted = attention_of is not None and self.decoder.attention is not None

        def step(states: State, x: Tensor, positions: Tensor) -> tuple[State, tuple[Tensor, ...]]:
            advanced = self.decoder.advance(x, positions, memory, source_mask, states)
            if wanted and advanced.weights is not None:
                return advanced.states, (advanced.features, advanced.weights)
            return advanced.states, (advanced.features,)

        features, *weights = over_time(step, tuple(state[:, None] for state in memory.start), embedded)
        if attention_of is None:
            return self.decoder.finish(features), None
        attention = weights[0] if weights else source_mask[:, None, :].expand(-1, target.shape[1], -1).float()
        # Rows sum to one, also where a window's weights don't, and where one vector stands for the whole source.
        return self.decoder.finish(features), attention / attention.sum(-1, keepdim=True)

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: logits [B, T, V] for what follows each position of `target`."""
        hidden, _ = self.decode(self.encode(source, source_mask), source_mask, target)
        return self.output(hidden)  # type: ignore[no-any-return]
