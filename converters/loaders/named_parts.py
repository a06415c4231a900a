"""Encoder-decoders in anybody's names: a config names the parts of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from torch import nn

from beamline.converters.checkpoints.generation_config import stated_defaults
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import read_tokenizer
from beamline.converters.loaders.reference import limits_for
from beamline.converters.modules.protocols import EncoderDecoder
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Vocabulary


class EncoderDecoderParts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    family: str
    weights: str = "model.safetensors"
    tokenizer: str = "spm.model"
    target_embedding: str
    output: str
    output_bias: str | None = None
    max_positions: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    source_eos: bool = True
    decoding: dict[str, Any] = {}
    source_language: str | None = None
    target_language: str | None = None
    description: str = ""


class NamedPartsConverter(GenerationConverter):
    def __init__(self, source: Path, config: Path) -> None:
        super().__init__(source)
        self.config = config

    @classmethod
    def from_source(cls, source: Source) -> Self:
        return cls(source.path, source.config_file)

    def _loaded(
        self,
        parts: EncoderDecoderParts,
        source_vocab_size: int,
        target_vocab_size: int,
        model: EncoderDecoder,
        original: nn.Module,
    ) -> LoadedModel:
        tokenizer = read_tokenizer(self.source / parts.tokenizer, add_eos=parts.source_eos)
        limits = limits_for(parts.max_positions, target_vocab_size)
        return LoadedModel(
            model=model,
            original=original.eval(),
            source_tokenizer=tokenizer,
            target_tokenizer=tokenizer,
            vocabulary=Vocabulary(
                source_size=source_vocab_size,
                target_size=target_vocab_size,
                pad_id=parts.pad_id,
                eos_ids=(parts.eos_id,),
                decoder_start_id=parts.decoder_start_id,
            ),
            limits=limits,
            defaults=stated_defaults(parts.decoding, limits, str(self.source)),
            source_languages=(parts.source_language,) if parts.source_language else (),
            target_languages=(parts.target_language,) if parts.target_language else (),
            description=parts.description,
        )
