"""Hugging Face Llama, Mistral, Qwen2 and Qwen3 -> our decoder-only Transformer. They differ in biases, attention
windows and norms of queries and keys; SmolLM2 and many others are Llamas by another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.loaders.language_models import LanguageModelConverter
from beamline.converters.loaders.llama_weights import llama_weights
from beamline.converters.loaders.rotary import longest_text, windows, wrong_layers, wrong_rope
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    DecoderOnlyConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
)


class LlamaConverter(LanguageModelConverter):
    family = "llama"  # until its own name has been read
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")
    description = (
        "Hugging Face Llama, Mistral and Qwen2 directories and GGUF files (SmolLM2 and others); Qwen3 directories"
    )

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        return [*wrong_activation(config, "hidden_act"), *wrong_rope(config), *wrong_layers(config)]

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
                query_key_norm="head" if config.model_type == "qwen3" else "none",
                norm_eps=config.rms_norm_eps,
            ),
            feed_forward=FeedForwardConfig(
                config.intermediate_size,
                ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
                gated=True,
                bias=bool(getattr(config, "mlp_bias", False)),
            ),
            norm=NormConfig("rms", config.rms_norm_eps),
            positions="rotary",
            max_positions=longest_text(config),
            windows=windows(config),
        )
        return DecoderOnlyConfig(decoder, tie_output=config.tie_word_embeddings)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return llama_weights(config, tensors)
