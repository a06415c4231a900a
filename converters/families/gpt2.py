"""Hugging Face GPT-2 -> our decoder-only Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beamline.converters.modules.causal import CausalConfig

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_LAYER = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.inner",
    "mlp.c_proj": "feed_forward.outer",
}


def unsupported(config: Any) -> list[str]:
    reasons = []
    if config.activation_function not in ACTIVATIONS:
        reasons.append(f"activation_function is {config.activation_function!r}; supported: {', '.join(ACTIVATIONS)}")
    if not config.scale_attn_weights:
        reasons.append("scale_attn_weights is off: attention without its scale is not supported")
    if config.scale_attn_by_inverse_layer_idx:
        reasons.append("scale_attn_by_inverse_layer_idx is set: a scale of its own for each layer is not supported")
    if config.add_cross_attention:
        reasons.append("add_cross_attention is set: it is half of an encoder-decoder")
    return reasons


def causal_config(config: Any) -> CausalConfig:
    return CausalConfig(
        vocab_size=config.vocab_size,
        d_model=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_width=config.n_embd // config.n_head,
        layers=config.n_layer,
        ffn=config.n_inner or 4 * config.n_embd,
        max_positions=config.n_positions,
        rms_norm=False,
        norm_eps=config.layer_norm_epsilon,
        rotary=False,
        gated=False,
        activation=ACTIVATIONS[config.activation_function],
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tie_output=config.tie_word_embeddings,
    )


def map_weights(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Their names are those of `GPT2LMHeadModel`, whose matrices are [inputs, outputs]; torch has them turned round."""
    mapped = {
        "embedding.weight": tensors["transformer.wte.weight"],
        "positions.weight": tensors["transformer.wpe.weight"],
        "norm.weight": tensors["transformer.ln_f.weight"],
        "norm.bias": tensors["transformer.ln_f.bias"],
        "output.weight": tensors["lm_head.weight"],
    }
    for layer in range(layers):
        for theirs, ours in _LAYER.items():
            for kind in ("weight", "bias"):
                tensor = tensors[f"transformer.h.{layer}.{theirs}.{kind}"]
                mapped[f"layers.{layer}.{ours}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
    return mapped
