"""The weights of `LlamaForCausalLM` and of the many that keep its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
_LAYER = {
    "self_attn.qkv_proj": "attention.qkv",  # where they are one matrix already
    "self_attn.o_proj": "attention.output",
    "mlp.gate_up_proj": "feed_forward.inner",
    "mlp.down_proj": "feed_forward.outer",
}
_JOINED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "feed_forward.inner": ("mlp.gate_proj", "mlp.up_proj"),
}


def llama_weights(config: Any, tensors: Mapping[str, Tensor], norms: Mapping[str, str] = NORMS) -> dict[str, Tensor]:
    """Those of a `DecoderOnlyTransformer`. `norms`: what a layer calls its norms, and what they are here."""
    mapped = {
        "embedding.tokens.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.{layer}"
        for kind in ("weight", "bias"):
            for their, our in {**norms, **_LAYER}.items():
                if f"{theirs}.{their}.{kind}" in tensors:
                    mapped[f"{ours}.{our}.{kind}"] = tensors[f"{theirs}.{their}.{kind}"]
            for our, parts in _JOINED.items():
                names = [f"{theirs}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    mapped[f"{ours}.{our}.{kind}"] = torch.cat([tensors[name] for name in names])
        if f"{theirs}.self_attn.q_norm.weight" in tensors:
            norm = [tensors[f"{theirs}.self_attn.{each}_norm.weight"] for each in "qk"]
            mapped |= _query_key_norm(config, f"{ours}.attention.query_key_norm", *norm)
    return mapped


def _query_key_norm(config: Any, name: str, query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """Of each head, which all have the same weights, or of the whole width."""
    if len(query) != getattr(config, "head_dim", None):
        return {f"{name}.query.weight": query, f"{name}.key.weight": key}
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return {f"{name}.weight": torch.cat([query.expand(heads[0], -1), key.expand(heads[1], -1)])}
