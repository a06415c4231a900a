"""Hugging Face Gemma 1, 2 and 3 (text) -> our decoder-only Transformer.

What can be is folded into the weights: norms multiply by one more than their weight, and attention has a scale of its
own (our queries are longer or shorter by what it differs from the usual one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from beamline.converters.families.llama import LlamaConverter
from beamline.converters.loaders.hugging_face import wrong_activation
from beamline.converters.loaders.llama_weights import NORMS, llama_weights
from beamline.converters.loaders.rotary import wrong_layers, wrong_rope
from beamline.converters.modules.transformer.config import DecoderOnlyConfig

_FOUR_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
_TABLES = ("full_attention", "sliding_attention")  # of angles, in Gemma 3


class GemmaConverter(LlamaConverter):
    family = "gemma"  # until its own name has been read
    model_types: ClassVar[tuple[str, ...]] = ("gemma", "gemma2", "gemma3_text")
    description = "Hugging Face Gemma 1, 2 and 3 directories, of text alone"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        activation = "hidden_act" if config.model_type == "gemma" else "hidden_activation"
        reasons = [*wrong_activation(config, activation), *wrong_rope(config), *wrong_layers(config)]
        if config.use_bidirectional_attention:
            reasons.append("use_bidirectional_attention is set: a text that is written sees only what stands before")
        if config.model_type == "gemma3_text" and config.attn_logit_softcapping is not None:
            reasons.append(f"attn_logit_softcapping is {config.attn_logit_softcapping}, which transformers ignores")
        return reasons

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        llama = super().architecture(config)
        first, third = config.model_type == "gemma", config.model_type == "gemma3_text"
        decoder = replace(
            llama.decoder,
            attention=replace(
                llama.decoder.attention,
                query_key_norm="head" if third else "none",
                softcap=getattr(config, "attn_logit_softcapping", None),
            ),
            norm=replace(llama.decoder.norm, placement="pre" if first else "both"),
            rotary_tables=tuple(_TABLES.index(kind) for kind in config.layer_types) if third else (),
            embedding_scale=config.hidden_size**0.5,
        )
        return replace(llama, decoder=decoder, logit_softcap=getattr(config, "final_logit_softcapping", None))

    @classmethod
    def frequencies(cls, original: Any) -> list[tuple[Tensor, float]]:
        if original.config.model_type != "gemma3_text":
            return super().frequencies(original)
        rotary = original.model.rotary_emb
        kinds = [kind if kind in rotary.layer_types else rotary.layer_types[0] for kind in _TABLES]
        return [
            (getattr(rotary, f"{kind}_original_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
            for kind in kinds
        ]

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scale = math.sqrt(config.head_dim / getattr(config, "query_pre_attn_scalar", config.head_dim))
        scaled = "q_norm" if config.model_type == "gemma3_text" else "q_proj"

        def folded(name: str, tensor: Tensor) -> Tensor:
            tensor = tensor + 1 if name.endswith("norm.weight") else tensor
            return tensor * scale if f".{scaled}." in name and scale != 1.0 else tensor

        norms = NORMS if config.model_type == "gemma" else _FOUR_NORMS
        return llama_weights(config, {name: folded(name, tensor) for name, tensor in tensors.items()}, norms)
