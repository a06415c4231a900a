"""Hugging Face OLMo 2 -> our decoder-only Transformer: a Llama that normalises what a sublayer adds, not what enters
it, and queries and keys over their whole width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from beamline.converters.families.llama import LlamaConverter
from beamline.converters.loaders.llama_weights import llama_weights
from beamline.converters.modules.transformer.config import DecoderOnlyConfig

_NORMS = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm"}


class Olmo2Converter(LlamaConverter):
    family = "olmo2"
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    description = "Hugging Face OLMo 2 directories"

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        llama = super().architecture(config)
        decoder = replace(
            llama.decoder,
            attention=replace(llama.decoder.attention, query_key_norm="width"),
            norm=replace(llama.decoder.norm, placement="output"),
        )
        return replace(llama, decoder=decoder)

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return llama_weights(config, tensors, _NORMS)
