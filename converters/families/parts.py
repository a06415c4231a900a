"""What the converters of torch.nn encoder-decoders have in common: a config that names a checkpoint's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import nn

from beamline.converters.base import Converter, Loaded
from beamline.converters.families.generation import stated_defaults
from beamline.converters.families.reference import Architecture, limits_of, vocabulary_of
from beamline.converters.families.tokenizer_file import read_tokenizer
from beamline.converters.modules.graphs import EncoderDecoder


class SequenceParts(BaseModel):
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


class PartsConverter(Converter):
    def __init__(self, source: Path, config: Path) -> None:
        super().__init__(source)
        self.config = config

    def _loaded(self, parts: SequenceParts, config: Architecture, model: EncoderDecoder, original: nn.Module) -> Loaded:
        text = read_tokenizer(self.source / parts.tokenizer, add_eos=parts.source_eos)
        return Loaded(
            model=model,
            original=original.eval(),
            source_text=text,
            target_text=text,
            vocabulary=vocabulary_of(config),
            limits=limits_of(config),
            defaults=stated_defaults(parts.decoding, limits_of(config), str(self.source)),
            source_languages=(parts.source_language,) if parts.source_language else (),
            target_languages=(parts.target_language,) if parts.target_language else (),
            description=parts.description,
        )
