"""Hugging Face Llama, Mistral and Qwen2 -> our decoder-only Transformer. They differ in biases and attention windows;
SmolLM2 and many others are Llamas by another name."""

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

# Rules by which positions are turned that are fixed once the checkpoint is known. Dynamic ones are, too, as far as the
# model was trained; beyond that they would turn the whole cache anew as a text grows.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.down_proj": "feed_forward.outer",
}
_JOINED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "feed_forward.inner": ("mlp.gate_proj", "mlp.up_proj"),
}


class LlamaConverter(LanguageModelConverter):
    family = "llama"  # until its own name has been read
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    description = "Hugging Face Llama, Mistral and Qwen2 directories and GGUF files: SmolLM2, TinyLlama and many others"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        reasons = wrong_activation(config, "hidden_act")
        rope = config.rope_parameters
        if rope["rope_type"] not in ROPE_TYPES:
            reasons.append(f"rope_type is {rope['rope_type']!r}; supported: {', '.join(ROPE_TYPES)}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            reasons.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}: heads turned in part")
        window = getattr(config, "sliding_window", None)
        if window is not None and window < config.max_position_embeddings:
            reasons.append(
                f"sliding_window is {window} and max_position_embeddings {config.max_position_embeddings}: "
                "attention to a window of the text is not supported"
            )
        return reasons

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        bias = bool(getattr(config, "attention_bias", False))
        heads = config.num_attention_heads
        decoder = StackConfig(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            layers=config.num_hidden_layers,
            attention=AttentionConfig(
                heads=heads,
                head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
                kv_heads=config.num_key_value_heads,
                qkv_bias=bias or config.model_type == "qwen2",
                output_bias=bias,
            ),
            feed_forward=FeedForwardConfig(
                config.intermediate_size,
                ACTIVATIONS[config.hidden_act],
                gated=True,
                bias=bool(getattr(config, "mlp_bias", False)),
            ),
            norm=NormConfig("rms", config.rms_norm_eps),
            positions="rotary",
            max_positions=config.max_position_embeddings,
        )
        return DecoderOnlyConfig(decoder, tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
        """Their names are those of `LlamaForCausalLM` and its like."""
        mapped = {
            "embedding.tokens.weight": tensors["model.embed_tokens.weight"],
            "norm.weight": tensors["model.norm.weight"],
            "output.weight": tensors["lm_head.weight"],
        }
        for layer in range(layers):
            theirs, ours = f"model.layers.{layer}", f"decoder.{layer}"
            for kind in ("weight", "bias"):
                for their, our in _LAYER.items():
                    if f"{theirs}.{their}.{kind}" in tensors:
                        mapped[f"{ours}.{our}.{kind}"] = tensors[f"{theirs}.{their}.{kind}"]
                for our, parts in _JOINED.items():
                    names = [f"{theirs}.{part}.{kind}" for part in parts]
                    if names[0] in tensors:
                        mapped[f"{ours}.{our}.{kind}"] = torch.cat([tensors[name] for name in names])
        return mapped
