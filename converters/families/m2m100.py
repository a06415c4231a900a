"""Hugging Face M2M100 and NLLB: BART's architecture with fairseq's positions, and tokens that name languages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from beamline.converters.families.bart import BartConverter
from beamline.converters.loaders.seq2seq import Text
from beamline.converters.loaders.translation_tokens import multilingual_text


class M2M100Converter(BartConverter):
    family = "m2m_100"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "Hugging Face M2M100 and NLLB directories"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        reasons = super().unsupported(config)
        if config.decoder_start_token_id == config.pad_token_id:
            reasons.append("decoder_start_token_id is pad_token_id, which has no position")
        return reasons

    def text(self, tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> Text:
        return multilingual_text(self.source, tokenizer, generation)
