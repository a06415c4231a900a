"""The Transformer that our own recipe trains, and the flat configuration that its checkpoints hold.

Both stacks are alike in it: what it can be is less than what the toolbox can build. The names of its fields and weights
are those on disk.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
    at_least_one,
    one_of,
    uneven_heads,
)
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer

ACTIVATIONS = ("relu", "gelu", "silu")
POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned")


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that shapes the network, and the ids it was trained with."""

    source_vocab_size: int
    target_vocab_size: int
    d_model: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    ffn: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    norm: str = "pre"  # pre: normalise what enters a sublayer; post: the sum that leaves it
    final_norm: bool = True  # one more norm after the last layer of either stack
    positions: str = "sinusoidal"  # sin/cos interleaved, in two halves, or learned
    max_positions: int = 256
    activation: str = "relu"
    scale_embedding: bool = True  # by sqrt(d_model)
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the target embedding is the output projection
    output_bias: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.1

    @property
    def architecture(self) -> EncoderDecoderConfig:
        attention = AttentionConfig.even(self.d_model, self.heads)

        def stack(vocab_size: int, layers: int, cross_attention: AttentionConfig | None) -> StackConfig:
            return StackConfig(
                vocab_size=vocab_size,
                d_model=self.d_model,
                layers=layers,
                attention=attention,
                cross_attention=cross_attention,
                feed_forward=FeedForwardConfig(self.ffn, self.activation),
                norm=NormConfig(eps=self.norm_eps, placement=self.norm, final=self.final_norm),
                positions=self.positions,
                max_positions=self.max_positions,
                embedding_scale=math.sqrt(self.d_model) if self.scale_embedding else 1.0,
                dropout=self.dropout,
            )

        return EncoderDecoderConfig(
            encoder=stack(self.source_vocab_size, self.encoder_layers, None),
            decoder=stack(self.target_vocab_size, self.decoder_layers, attention),
            share_embeddings=self.share_embeddings,
            tie_output=self.tie_output,
            output_bias=self.output_bias,
        )

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        found = [*uneven_heads(self.d_model, self.heads)]
        found += one_of("norm", self.norm, ("pre", "post"))
        found += one_of("positions", self.positions, POSITIONS)
        found += one_of("activation", self.activation, ACTIVATIONS)
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            found.append(
                "share_embeddings needs one vocabulary, but source_vocab_size is "
                f"{self.source_vocab_size} and target_vocab_size is {self.target_vocab_size}"
            )
        if self.d_model % 2 and self.positions != "learned":
            found.append(f"sinusoidal positions need an even d_model, not {self.d_model}")
        found += at_least_one(self, "source_vocab_size", "target_vocab_size", "d_model", "heads", "ffn")
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a start and an end need 2")
        if self.encoder_layers < 1 or self.decoder_layers < 1:
            found.append("encoder_layers and decoder_layers must be at least 1")
        for name in ("pad_id", "eos_id", "decoder_start_id"):
            if not 0 <= getattr(self, name) < self.target_vocab_size:
                found.append(f"{name} is {getattr(self, name)}, outside the vocabulary")
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def field_names(cls) -> set[str]:
        return {field.name for field in fields(cls)}


class Transformer(EncoderDecoderTransformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.architecture)
        self.config = config
