"""Hugging Face Phi-3 and Phi-4 -> our decoder-only Transformer: a Llama with joined matrices, with a partial rotary
embedding, maybe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.families.llama import LlamaConverter
from beamline.converters.loaders.hugging_face import wrong_activation
from beamline.converters.loaders.llama_weights import llama_weights
from beamline.converters.loaders.rotary import partial_rotary, rotary_width, wrong_rope


class Phi3Converter(LlamaConverter):
    family = "phi3"
    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    description = "Hugging Face Phi-3 and Phi-4 directories, of text alone"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        return [*wrong_activation(config, "hidden_act"), *wrong_rope(config, partial=True)]

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mapped = llama_weights(config, tensors)
        attention = cls.architecture(config).decoder.attention
        width = rotary_width(config, attention.head_width)
        if width < attention.head_width:
            for layer in range(config.num_hidden_layers):
                name = f"decoder.{layer}.attention.qkv.weight"
                sizes = [(attention.heads + attention.kv_heads) * attention.head_width, attention.kv_width]
                query_key, value = mapped[name].split(sizes)  # type: ignore[no-untyped-call]
                query_key = partial_rotary(query_key, attention.heads + attention.kv_heads, width)
                mapped[name] = torch.cat([query_key, value])
        return mapped
