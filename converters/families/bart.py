"""Hugging Face BART, mBART and Pegasus: one architecture, whose norms and positions differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.loaders.bart_weights import map_layers
from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.loaders.seq2seq import Seq2SeqConverter, Text, output_bias
from beamline.converters.loaders.translation_tokens import multilingual_text
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
)

_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


@dataclass(frozen=True)
class Traits:
    """In what the types differ."""

    placement: str  # of norms; where they stand before, one more stands behind the last layer
    embedding_norm: bool
    positions: str
    skipped_positions: int = 0  # rows of a learned table that stand before the first position


TRAITS = {
    "bart": Traits("post", embedding_norm=True, positions="learned", skipped_positions=2),
    "mbart": Traits("pre", embedding_norm=True, positions="learned", skipped_positions=2),
    "pegasus": Traits("pre", embedding_norm=False, positions="sinusoidal_halves"),
    "m2m_100": Traits("pre", embedding_norm=False, positions="sinusoidal_fairseq"),
}


class BartConverter(Seq2SeqConverter):
    family = "bart"  # until its own name has been read
    model_types: ClassVar[tuple[str, ...]] = ("bart", "mbart", "pegasus")
    description = "Hugging Face BART, mBART-25, mBART-50 and Pegasus directories"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        reasons = wrong_activation(config, "activation_function")
        for side in ("encoder", "decoder"):
            heads = getattr(config, f"{side}_attention_heads")
            if config.d_model % heads:
                reasons.append(f"d_model {config.d_model} is not a multiple of {side}_attention_heads {heads}")
        if getattr(config, "normalize_before", None) and config.model_type == "bart":
            reasons.append("normalize_before is set, which transformers does not read")
        return reasons

    @classmethod
    def architecture(cls, config: Any, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
        traits = TRAITS[config.model_type]
        vocabulary = tensors[_TARGET].shape[0]

        def stack(side: str) -> StackConfig:
            attention = AttentionConfig.even(config.d_model, getattr(config, f"{side}_attention_heads"))
            return StackConfig(
                vocab_size=vocabulary,
                d_model=config.d_model,
                layers=getattr(config, f"{side}_layers"),
                attention=attention,
                cross_attention=attention if side == "decoder" else None,
                feed_forward=FeedForwardConfig(
                    getattr(config, f"{side}_ffn_dim"), ACTIVATIONS[config.activation_function]
                ),
                norm=NormConfig(placement=traits.placement, final=traits.placement == "pre"),
                positions=traits.positions,
                max_positions=config.max_position_embeddings,
                padding_id=config.pad_token_id or 0,
                embedding_scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
                embedding_norm=traits.embedding_norm,
            )

        return EncoderDecoderConfig(
            encoder=stack("encoder"),
            decoder=stack("decoder"),
            share_embeddings=torch.equal(tensors[_SOURCE], tensors[_TARGET]),
            tie_output=torch.equal(tensors[_TARGET], tensors["lm_head.weight"]),
            output_bias=output_bias(tensors) is not None,
        )

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        traits = TRAITS[config.model_type]
        embeddings = {
            "source_embedding.tokens.weight": tensors[_SOURCE],
            "target_embedding.tokens.weight": tensors[_TARGET],
            "output.weight": tensors["lm_head.weight"],
        }
        if traits.positions == "learned":
            for ours, theirs in (("source", "encoder"), ("target", "decoder")):
                table = tensors[f"model.{theirs}.embed_positions.weight"]
                embeddings[f"{ours}_embedding.table"] = table[traits.skipped_positions :]
        bias = output_bias(tensors)
        if bias is not None:
            embeddings["output.bias"] = bias
        around = ("embed_tokens.weight", "embed_positions.weight", "shared.weight", "lm_head.weight", "logits_bias")
        return embeddings | map_layers({name: each for name, each in tensors.items() if not name.endswith(around)})

    def text(self, tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> Text:
        if config.model_type != "mbart":
            return super().text(tokenizer, config, generation)
        return multilingual_text(self.source, tokenizer, generation)
