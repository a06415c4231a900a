"""Hugging Face SmolLM3 -> our decoder-only Transformer: a Llama of whose layers some know no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from beamline.converters.families.llama import LlamaConverter
from beamline.converters.modules.transformer.config import DecoderOnlyConfig


class SmolLM3Converter(LlamaConverter):
    family = "smollm3"
    model_types: ClassVar[tuple[str, ...]] = ("smollm3",)
    description = "Hugging Face SmolLM3 directories"

    @classmethod
    def architecture(cls, config: Any) -> DecoderOnlyConfig:
        llama = super().architecture(config)
        tables = tuple(0 if rotary else None for rotary in config.no_rope_layers[: config.num_hidden_layers])
        return replace(llama, decoder=replace(llama.decoder, rotary_tables=tables))
