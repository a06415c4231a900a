"""Hugging Face GPT-2 -> our decoder-only Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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

_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "ln_cross_attn": "cross_attention_norm",
    "crossattention.q_attn": "cross_attention.query",
    "crossattention.c_attn": "cross_attention.key_value",
    "crossattention.c_proj": "cross_attention.output",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.inner",
    "mlp.c_proj": "feed_forward.outer",
}


class Gpt2Converter(LanguageModelConverter):
    family = "gpt2"
    model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    description = "Hugging Face GPT-2 directories and GGUF files"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        reasons = layer_problems(config)
        if config.add_cross_attention:
            reasons.append("add_cross_attention is set: it is half of an encoder-decoder")
        return reasons

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        return DecoderOnlyConfig(decoder_stack(config), tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their names are those of `GPT2LMHeadModel`."""
        mapped = {
            "embedding.tokens.weight": tensors["transformer.wte.weight"],
            "embedding.table": tensors["transformer.wpe.weight"],
            "norm.weight": tensors["transformer.ln_f.weight"],
            "norm.bias": tensors["transformer.ln_f.bias"],
            "output.weight": tensors["lm_head.weight"],
        }
        for layer in range(config.n_layer):
            mapped |= map_layer(tensors, f"transformer.h.{layer}", f"decoder.{layer}")
        return mapped


def layer_problems(config: Any) -> list[str]:
    reasons = wrong_activation(config, "activation_function")
    if not config.scale_attn_weights:
        reasons.append("scale_attn_weights is off: attention without its scale is not supported")
    if config.scale_attn_by_inverse_layer_idx:
        reasons.append("scale_attn_by_inverse_layer_idx is set: a scale of its own for each layer is not supported")
    return reasons


def decoder_stack(config: Any) -> StackConfig:
    """With cross-attention where it is the decoder of a pair."""
    attention = AttentionConfig.even(config.n_embd, config.n_head)
    return StackConfig(
        vocab_size=config.vocab_size,
        d_model=config.n_embd,
        layers=config.n_layer,
        attention=attention,
        cross_attention=attention if config.add_cross_attention else None,
        feed_forward=FeedForwardConfig(config.n_inner or 4 * config.n_embd, ACTIVATIONS[config.activation_function]),
        norm=NormConfig(eps=config.layer_norm_epsilon),
        positions="learned",
        max_positions=config.n_positions,
    )


def map_layer(tensors: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Their matrices are [inputs, outputs]; torch has them transposed."""
    mapped = {}
    for part, name in _LAYER.items():
        for kind in ("weight", "bias"):
            tensor = tensors.get(f"{theirs}.{part}.{kind}")
            if tensor is not None:  # only a pair's decoder has cross-attention
                mapped[f"{ours}.{name}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    return mapped
