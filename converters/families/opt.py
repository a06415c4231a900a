"""Hugging Face OPT -> our decoder-only Transformer. Its smallest but one (350m) has its norms behind the sublayers, and
vectors of tokens that are narrower than the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.loaders.language_models import LanguageModelConverter
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    DecoderOnlyConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
)

_OFFSET = 2  # rows of the position table that no position has
_LAYER = {
    "self_attn_layer_norm": "attention_norm",
    "self_attn.out_proj": "attention.output",
    "final_layer_norm": "feed_forward_norm",
    "fc1": "feed_forward.inner",
    "fc2": "feed_forward.outer",
}
_TOP = {"project_in": "embedding.projection", "project_out": "projection", "final_layer_norm": "norm"}


class OptConverter(LanguageModelConverter):
    family = "opt"
    model_types: ClassVar[tuple[str, ...]] = ("opt",)
    description = "Hugging Face OPT directories"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        reasons = wrong_activation(config, "activation_function")
        if not config.layer_norm_elementwise_affine:
            reasons.append("layer_norm_elementwise_affine is off: norms without weights are not supported")
        return reasons

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        heads, narrow = config.num_attention_heads, config.word_embed_proj_dim
        width, bias = config.hidden_size // heads, bool(config.enable_bias)
        before = bool(config.do_layer_norm_before)
        decoder = StackConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            layers=config.num_hidden_layers,
            attention=AttentionConfig(heads, width, heads, qkv_bias=bias, output_bias=bias),
            feed_forward=FeedForwardConfig(config.ffn_dim, ACTIVATIONS[config.activation_function], bias=bias),
            norm=NormConfig(
                placement="pre" if before else "post", final=before and not config._remove_final_layer_norm
            ),
            positions="learned",
            max_positions=config.max_position_embeddings,
            embedding_width=None if narrow == config.hidden_size else narrow,
        )
        return DecoderOnlyConfig(decoder, tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mapped = {
            "embedding.tokens.weight": tensors["model.decoder.embed_tokens.weight"],
            "embedding.table": tensors["model.decoder.embed_positions.weight"][_OFFSET:],
            "output.weight": tensors["lm_head.weight"],
        }
        for kind in ("weight", "bias"):
            for their, our in _TOP.items():
                if f"model.decoder.{their}.{kind}" in tensors:
                    mapped[f"{our}.{kind}"] = tensors[f"model.decoder.{their}.{kind}"]
            for layer in range(config.num_hidden_layers):
                theirs, ours = f"model.decoder.layers.{layer}", f"decoder.{layer}"
                for their, our in _LAYER.items():
                    if f"{theirs}.{their}.{kind}" in tensors:
                        mapped[f"{ours}.{our}.{kind}"] = tensors[f"{theirs}.{their}.{kind}"]
                names = [f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv"]
                if names[0] in tensors:
                    mapped[f"{ours}.attention.qkv.{kind}"] = torch.cat([tensors[name] for name in names])
        return mapped
