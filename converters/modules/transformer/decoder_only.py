"""The decoder-only Transformer: the shape that every language model's loader maps onto.

Shapes in comments: B requests, T positions, d model width, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beamline.converters.modules.transformer.attention import attend, causal_mask
from beamline.converters.modules.transformer.config import DecoderOnlyConfig
from beamline.converters.modules.transformer.embedding import Embedding
from beamline.converters.modules.transformer.layers import Stack
from beamline.converters.modules.transformer.norms import make_final_norm
from beamline.converters.modules.transformer.relative import Masks, distances_in_text, relative_bias


class DecoderOnlyTransformer(nn.Module):
    def __init__(self, architecture: DecoderOnlyConfig) -> None:
        super().__init__()
        self.architecture = architecture
        decoder = architecture.decoder
        width = decoder.embedding_width or decoder.d_model
        self.embedding = Embedding(decoder, nn.Embedding(decoder.vocab_size, width))
        self.decoder = Stack(decoder)
        self.bias = relative_bias(decoder, both_ways=False)
        self.norm = make_final_norm(decoder)
        self.projection = None if width == decoder.d_model else nn.Linear(decoder.d_model, width, bias=False)
        self.output = nn.Linear(width, decoder.vocab_size, bias=architecture.output_bias)
        self.tie()

    def tie(self) -> None:
        if self.architecture.tie_output:
            self.output.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole texts from their beginning: logits [B, T, V] for what follows each token."""
        decoder = self.architecture.decoder
        masks = Masks(self.bias, lambda: distances_in_text(tokens), causal_mask(tokens), decoder.windows)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.decoder.run(
            self.embedding(tokens, places),
            lambda number, query, key, value: attend(query, key, value, masks[number], decoder.attention.softcap),
            self.embedding.angles(tokens, places),
        )
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """What leaves the last layer [B, T, d] -> [B, T, V]"""
        x = self.norm(x)
        if self.projection is not None:
            x = self.projection(x)
        logits: Tensor = self.output(x)
        cap = self.architecture.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap
