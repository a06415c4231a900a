"""The Transformer with an encoder and a decoder: the shape that every such family's loader maps onto.

Shapes in comments: B requests, S source positions, T target positions, d model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beamline.converters.modules.initialization import reset
from beamline.converters.modules.transformer.attention import CrossAttention, attend, causal_mask, visible_to_all
from beamline.converters.modules.transformer.config import EncoderDecoderConfig
from beamline.converters.modules.transformer.embedding import Embedding
from beamline.converters.modules.transformer.layers import OutputTransform, Stack
from beamline.converters.modules.transformer.norms import make_final_norm
from beamline.converters.modules.transformer.relative import Masks, distances_in_text, relative_bias


class EncoderDecoderTransformer(nn.Module):
    def __init__(self, architecture: EncoderDecoderConfig) -> None:
        super().__init__()
        self.architecture = architecture
        encoder, decoder = architecture.encoder, architecture.decoder
        target = nn.Embedding(decoder.vocab_size, decoder.d_model)
        source = target if architecture.share_embeddings else nn.Embedding(encoder.vocab_size, encoder.d_model)
        self.source_embedding = Embedding(encoder, source)
        self.target_embedding = Embedding(decoder, target)
        self.encoder = Stack(encoder)
        self.decoder = Stack(decoder, memory_width=encoder.d_model)
        self.encoder_bias = relative_bias(encoder, both_ways=True)
        self.decoder_bias = relative_bias(decoder, both_ways=False)
        self.encoder_norm = make_final_norm(encoder)
        self.decoder_norm = OutputTransform(decoder) if decoder.output_transform else make_final_norm(decoder)
        self.output = nn.Linear(decoder.d_model, decoder.vocab_size, bias=architecture.output_bias)
        reset(self, decoder.d_model)
        self.tie()

    def tie(self) -> None:
        if self.architecture.tie_output:
            self.output.weight = self.target_embedding.tokens.weight

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """Of the decoder's layers, from the bottom."""
        return [layer.cross_attention for layer in self.decoder.layers() if layer.cross_attention is not None]

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """source [B, S], source_mask [B, S] (true where there is a token) -> [B, S, d]"""
        places = torch.arange(source.shape[1], device=source.device)
        masks = Masks(self.encoder_bias, lambda: distances_in_text(source), visible_to_all(source_mask, source))
        x = self.encoder.run(
            self.source_embedding(source, places),
            lambda number, query, key, value: attend(query, key, value, masks[number]),
            self.source_embedding.angles(source, places),
        )
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self, memory: Tensor, source_mask: Tensor, target: Tensor, attention_of: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A whole target under a causal mask: the last hidden states [B, T, d], and the attention [B, T, S] that one
        layer paid to the source, its heads averaged, if it is asked for."""
        visible = visible_to_all(source_mask, target)
        masks = Masks(self.decoder_bias, lambda: distances_in_text(target), causal_mask(target))
        paid: Tensor | None = None

        def cross_attend(number: int, cross: CrossAttention, y: Tensor) -> Tensor:
            nonlocal paid
            key, value = cross.project_memory(memory)
            if number == attention_of:
                paid = cross.weights(y, key, visible).mean(1)
            return cross(y, key, value, visible)  # type: ignore[no-any-return]

        places = torch.arange(target.shape[1], device=target.device)
        x = self.decoder.run(
            self.target_embedding(target, places),
            lambda number, query, key, value: attend(query, key, value, masks[number]),
            self.target_embedding.angles(target, places),
            cross_attend,
        )
        return self.decoder_norm(x), paid

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: logits [B, T, V] for what follows each position of `target`."""
        hidden, _ = self.decode(self.encode(source, source_mask), source_mask, target)
        return self.output(hidden)  # type: ignore[no-any-return]

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor, attention_of: int) -> tuple[Tensor, Tensor]:
        """Teacher forcing with the attention that layer `attention_of` paid to the source."""
        hidden, attention = self.decode(self.encode(source, source_mask), source_mask, target, attention_of)
        assert attention is not None, f"there is no decoder layer {attention_of}"
        return self.output(hidden), attention
