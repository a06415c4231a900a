"""The names of fairseq's Transformer in Hugging Face's hands, which BART, Marian, M2M100 and many others share."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_RENAMES = {
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn.q_proj": "cross_attention.query",
    "encoder_attn.out_proj": "cross_attention.output",
    "encoder_attn_layer_norm": "cross_attention_norm",
    "fc1": "feed_forward.inner",
    "fc2": "feed_forward.outer",
    "final_layer_norm": "feed_forward_norm",
}
# Their separate projections are our wide ones.
_JOINED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}
_LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
_AROUND = {
    "model.encoder.layer_norm": "encoder_norm",
    "model.decoder.layer_norm": "decoder_norm",
    "model.encoder.layernorm_embedding": "source_embedding.norm",
    "model.decoder.layernorm_embedding": "target_embedding.norm",
}


def map_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All but embeddings and output, by the names of an `EncoderDecoderTransformer`. What has no place in it keeps its
    name, so that whoever loads them reports it."""
    mapped: dict[str, Tensor] = {}
    joined = {part for parts in _JOINED.values() for part in parts}
    for name, tensor in tensors.items():
        around, _, kind = name.rpartition(".")
        found = _LAYER.fullmatch(name)
        if found is None:
            mapped[f"{_AROUND[around]}.{kind}" if around in _AROUND else name] = tensor
        elif found[3] in _RENAMES:
            mapped[f"{found[1]}.{found[2]}.{_RENAMES[found[3]]}.{kind}"] = tensor
        elif found[3] not in joined:
            mapped[name] = tensor
    layers = sorted({(found[1], found[2]) for name in tensors if (found := _LAYER.fullmatch(name))})
    for side, number in layers:
        for ours, parts in _JOINED.items():
            for kind in ("weight", "bias"):
                names = [f"model.{side}.layers.{number}.{part}.{kind}" for part in parts]
                if all(name in tensors for name in names):
                    mapped[f"{side}.{number}.{ours}.{kind}"] = torch.cat([tensors[name] for name in names])
    return mapped
