"""Hugging Face Bloom -> our decoder-only Transformer. It knows no positions: attention fades with distance (ALiBi), by
a slope of each head's own, which is a table of distances here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.loaders.language_models import LanguageModelConverter, parts_of_heads
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    DecoderOnlyConfig,
    FeedForwardConfig,
    NormConfig,
    RelativeConfig,
    StackConfig,
)

_POSITIONS = 2048  # where a checkpoint does not say how long its texts were: there is no limit but memory
_TOP = {"word_embeddings.": "embedding.tokens.", "word_embeddings_layernorm.": "embedding.norm.", "ln_f.": "norm."}
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.dense_h_to_4h": "feed_forward.inner",
    "mlp.dense_4h_to_h": "feed_forward.outer",
}


class BloomConverter(LanguageModelConverter):
    family = "bloom"
    model_types: ClassVar[tuple[str, ...]] = ("bloom",)
    description = "Hugging Face Bloom directories"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        if config.apply_residual_connection_post_layernorm:
            return ["apply_residual_connection_post_layernorm is set: residuals behind a norm are not supported"]
        return []

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        positions = getattr(config, "seq_length", None) or _POSITIONS
        decoder = StackConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            layers=config.n_layer,
            attention=AttentionConfig.even(config.hidden_size, config.n_head),
            feed_forward=FeedForwardConfig(4 * config.hidden_size, "gelu_tanh"),
            norm=NormConfig(eps=config.layer_norm_epsilon),
            positions="none",
            max_positions=positions,
            relative=RelativeConfig(max_distance=positions),
            embedding_norm=True,
        )
        return DecoderOnlyConfig(decoder, tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        positions = cls.architecture(config).decoder.max_positions
        distances = torch.arange(-positions, 1).float()
        table = distances[:, None] * _slopes(config)
        mapped = {"output.weight": tensors["lm_head.weight"], "bias.table": table[None]}
        for their, our in _TOP.items():
            for kind in ("weight", "bias"):
                if f"transformer.{their}{kind}" in tensors:
                    mapped[our + kind] = tensors[f"transformer.{their}{kind}"]
        for layer in range(config.n_layer):
            theirs, ours = f"transformer.h.{layer}", f"decoder.{layer}"
            for kind in ("weight", "bias"):
                for their, our in _LAYER.items():
                    mapped[f"{ours}.{our}.{kind}"] = tensors[f"{theirs}.{their}.{kind}"]
                joined = tensors[f"{theirs}.self_attention.query_key_value.{kind}"]
                mapped[f"{ours}.attention.qkv.{kind}"] = torch.cat(parts_of_heads(joined, config.n_head))
        return mapped


def _slopes(config: Any) -> Tensor:
    """[heads]; a power of two of them, then every other one of twice as many."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    two_places = torch.ones(1, 2, dtype=torch.long)
    found: Tensor = build_alibi_tensor(two_places, config.n_head, torch.float32)  # [heads, 1, 2]: 0 and the slope
    return found[:, 0, 1]
