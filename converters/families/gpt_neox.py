"""Hugging Face GPT-NeoX -> our decoder-only Transformer: Pythia, and others of EleutherAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.loaders.language_models import LanguageModelConverter, parts_of_heads
from beamline.converters.loaders.rotary import longest_text, partial_rotary, rotary_width, wrong_rope
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    DecoderOnlyConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
)

_LAYER = {
    "input_layernorm": "attention_norm",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.dense_h_to_4h": "feed_forward.inner",
    "mlp.dense_4h_to_h": "feed_forward.outer",
}


class GptNeoXConverter(LanguageModelConverter):
    family = "gpt_neox"
    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)
    description = "Hugging Face GPT-NeoX directories: Pythia and others"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        return [*wrong_activation(config, "hidden_act"), *wrong_rope(config, partial=True)]

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        heads = config.num_attention_heads
        bias = bool(config.attention_bias)
        width = config.hidden_size // heads
        decoder = StackConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            layers=config.num_hidden_layers,
            attention=AttentionConfig(heads, width, heads, qkv_bias=bias, output_bias=bias),
            feed_forward=FeedForwardConfig(config.intermediate_size, ACTIVATIONS[config.hidden_act]),
            norm=NormConfig(eps=config.layer_norm_eps),
            positions="rotary",
            max_positions=longest_text(config),
            parallel=config.use_parallel_residual,
        )
        return DecoderOnlyConfig(decoder, tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        heads = config.num_attention_heads
        width = rotary_width(config, config.hidden_size // heads)
        mapped = {
            "embedding.tokens.weight": tensors["gpt_neox.embed_in.weight"],
            "norm.weight": tensors["gpt_neox.final_layer_norm.weight"],
            "norm.bias": tensors["gpt_neox.final_layer_norm.bias"],
            "output.weight": tensors["lm_head.weight"],
        }
        for layer in range(config.num_hidden_layers):
            theirs, ours = f"gpt_neox.layers.{layer}", f"decoder.{layer}"
            for kind in ("weight", "bias"):
                for their, our in _LAYER.items():
                    if f"{theirs}.{their}.{kind}" in tensors:
                        mapped[f"{ours}.{our}.{kind}"] = tensors[f"{theirs}.{their}.{kind}"]
                joined = f"{theirs}.attention.query_key_value.{kind}"
                if joined in tensors:
                    query, key, value = parts_of_heads(tensors[joined], heads)
                    query, key = (partial_rotary(each, heads, width) for each in (query, key))
                    mapped[f"{ours}.attention.qkv.{kind}"] = torch.cat([query, key, value])
        return mapped
