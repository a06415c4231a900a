"""Encoder-decoders in anybody's names: a config names the parts of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from torch import nn

from beamline.converters.checkpoints.generation_config import stated_defaults
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer, read_tokenizer
from beamline.converters.checkpoints.vocabularies import Example, Examples
from beamline.converters.loaders.reference import limits_for
from beamline.converters.modules.protocols import EncoderDecoder
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Vocabulary
from beamline.serving.errors import UnsupportedCheckpoint

_USUAL_TOKENIZER = "spm.model"


class EncoderDecoderParts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    family: str
    weights: str | None = None  # the only file of weights in the folder
    tokenizer: str | None = None  # spm.model, where source and target have one embedding
    source_tokenizer: str | None = None
    target_tokenizer: str | None = None
    source_example: Example | None = None
    target_example: Example | None = None
    source_embedding: str | None = None
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

    def tokenizer_problems(self) -> list[str]:
        """One embedding has one vocabulary. Of two, nothing in the weights says which vocabulary is whose: the file has
        to, and to prove it by an example for each."""
        apart = {
            name: getattr(self, name)
            for name in ("source_tokenizer", "target_tokenizer", "source_example", "target_example")
        }
        given = [name for name, value in apart.items() if value is not None]
        missing = [name for name in apart if name not in given]
        two = self.source_embedding not in (None, self.target_embedding)
        if not two:
            return [f"{name} is for a source_embedding that is not the target_embedding" for name in given]
        reasons = ["tokenizer is for one embedding; these are two"] if self.tokenizer is not None else []
        if missing:
            reasons.append(
                f"source_embedding and target_embedding are two tensors; {', '.join(missing)} must say which "
                "vocabulary is whose (the same tokenizer twice, if they share one)"
            )
        return reasons


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
        source_tokenizer, target_tokenizer = self._tokenizers(parts)
        limits = limits_for(parts.max_positions, target_vocab_size)
        return LoadedModel(
            model=model,
            original=original.eval(),
            source_tokenizer=source_tokenizer,
            target_tokenizer=target_tokenizer,
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
            examples=_examples(parts),
            description=parts.description,
        )

    def _tokenizers(self, parts: EncoderDecoderParts) -> tuple[OriginalTokenizer, OriginalTokenizer]:
        """The same one twice where source and target share it."""
        if reasons := parts.tokenizer_problems():
            raise UnsupportedCheckpoint(str(self.source), [f"{self.config.name}: {reason}" for reason in reasons])
        names = [parts.source_tokenizer, parts.target_tokenizer]
        if names[0] == names[1]:
            shared = names[0] or parts.tokenizer or _USUAL_TOKENIZER
            tokenizer = read_tokenizer(self.source / shared, add_eos=parts.source_eos)
            return tokenizer, tokenizer
        source, target = (read_tokenizer(self.source / str(name), add_eos=parts.source_eos) for name in names)
        return source, target


def _examples(parts: EncoderDecoderParts) -> Examples | None:
    if parts.source_example is None or parts.target_example is None:
        return None
    return Examples(parts.source_example, parts.target_example)
