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


class DecoderOnlyTransformer(nn.Module):
    def __init__(self, architecture: DecoderOnlyConfig) -> None:
        super().__init__()
        self.architecture = architecture
        decoder = architecture.decoder
        self.embedding = Embedding(decoder, nn.Embedding(decoder.vocab_size, decoder.d_model))
        self.decoder = Stack(decoder)
        self.norm = make_final_norm(decoder)
        self.output = nn.Linear(decoder.d_model, decoder.vocab_size, bias=architecture.output_bias)
        self.tie()

    def tie(self) -> None:
        if self.architecture.tie_output:
            self.output.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole texts from their beginning: logits [B, T, V] for what follows each token."""
        causal = causal_mask(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.decoder.run(
            self.embedding(tokens, places),
            lambda number, query, key, value: attend(query, key, value, causal),
            self.embedding.angles(tokens, places),
        )
        return self.output(self.norm(x))  # type: ignore[no-any-return]
