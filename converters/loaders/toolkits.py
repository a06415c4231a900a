"""Transformers of other toolkits, fairseq and OpenNMT-py: a folder with one pickle, its words, and what cuts text into
them. A family says how its options and weights are to be read; the rest is the same."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from beamline.converters.checkpoints.files import fill, read_parts
from beamline.converters.checkpoints.generation_config import stated_defaults
from beamline.converters.checkpoints.pickles import read_pickle
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
from beamline.converters.checkpoints.word_lists import SPACES, WordList, tokenizer_for
from beamline.converters.loaders.bart_weights import map_layers
from beamline.converters.loaders.plain_transformer import PlainTransformer, Positions
from beamline.converters.loaders.reference import limits_for
from beamline.converters.modules.transformer.config import EncoderDecoderConfig
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Languages, Vocabulary
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint

_PIECES = (".model", ".spm")


class ToolkitParts(BaseModel):
    """What a file given by --config may say, where the folder alone does not."""

    model_config = ConfigDict(extra="forbid")

    family: str
    weights: str | None = None  # the only .pt file of the folder
    tokenizer: str | None = None  # the only sentencepiece model of the folder
    source_tokenizer: str | None = None  # where either side has its own
    target_tokenizer: str | None = None
    source_dictionary: str | None = None  # fairseq's; dict.en.txt, by the language that the checkpoint names
    target_dictionary: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    max_positions: int | None = None  # at most what the checkpoint has
    decoding: dict[str, Any] = {}
    description: str = ""


@dataclass(frozen=True)
class ToolkitModel:
    """What a family reads out of a checkpoint."""

    architecture: EncoderDecoderConfig
    tensors: dict[str, Tensor]  # by fairseq's names
    positions: Mapping[str, Positions]  # of encoder and decoder, as the toolkit computes them
    source: WordList
    target: WordList
    pad_id: int
    eos_id: int
    start_id: int
    source_language: str | None
    target_language: str | None
    languages: Languages | None = None
    forbidden: tuple[int, ...] = ()  # what the toolkit's own search never writes


class ToolkitConverter(GenerationConverter):
    toolkit: ClassVar[str]
    unreadable: ClassVar[str] = ""  # what to do with a file that can't be read without running its code

    def __init__(self, source: Path, config: Path | None = None) -> None:
        super().__init__(source)
        self.config = config

    @classmethod
    def from_source(cls, source: Source) -> Self:
        return cls(source.path, source.config_file if source.config_file.is_file() else None)

    @abstractmethod
    def read(self, content: dict[str, Any], weights: Path, parts: ToolkitParts) -> ToolkitModel:
        """Raises `UnsupportedCheckpoint` with every reason."""

    def load(self) -> LoadedModel:
        parts = ToolkitParts(family=self.family) if self.config is None else read_parts(ToolkitParts, self.config)
        weights = self._weights(parts)
        found = self.read(read_pickle(weights, self.unreadable), weights, parts)
        self.refuse(found.architecture.problems())
        model = EncoderDecoderTransformer(found.architecture)
        fill(model, _mapped(found), str(weights))
        source, target = self._tokenizers(found, parts)
        encoder, decoder = found.architecture.encoder, found.architecture.decoder
        limits = limits_for(decoder.max_positions, decoder.vocab_size)
        limits = limits.model_copy(update={"max_source_length": encoder.max_positions})
        never = {"bad_words": [[index] for index in found.forbidden]} if found.forbidden else {}
        languages = found.languages
        single = tuple(((name,) if name else ()) for name in (found.source_language, found.target_language))
        return LoadedModel(
            model=EncoderDecoderSteps(model.eval()),
            original=PlainTransformer(found.architecture, found.tensors, found.positions),
            source_tokenizer=source,
            target_tokenizer=target,
            vocabulary=Vocabulary(
                source_size=encoder.vocab_size,
                target_size=decoder.vocab_size,
                pad_id=found.pad_id,
                eos_ids=(found.eos_id,),
                decoder_start_id=found.start_id,
            ),
            limits=limits,
            defaults=stated_defaults({**never, **parts.decoding}, limits, str(self.source)),
            languages=languages,
            source_languages=single[0] if languages is None else tuple(each.code for each in languages.source),
            target_languages=single[1] if languages is None else tuple(each.code for each in languages.target),
            description=parts.description or f"{self.toolkit} Transformer {weights.name}",
        )

    def refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)

    def _weights(self, parts: ToolkitParts) -> Path:
        if parts.weights is not None:
            if not (self.source / parts.weights).is_file():
                raise ConversionError(f"{self.source / parts.weights} is missing")
            return self.source / parts.weights
        found = sorted(self.source.glob("*.pt"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise ConversionError(
                f"{self.source} must have one checkpoint (*.pt), but has {names}; of several, a file given by --config "
                f'names it: {{"family": "{self.family}", "weights": "..."}}'
            )
        return found[0]

    def _tokenizers(self, found: ToolkitModel, parts: ToolkitParts) -> tuple[OriginalTokenizer, OriginalTokenizer]:
        """The same one twice where source and target share file and words."""
        named = parts.source_tokenizer or parts.tokenizer, parts.target_tokenizer or parts.tokenizer
        spoken = found.source_language, found.target_language
        files = [
            self._pieces(name, of, side) for name, of, side in zip(named, spoken, ("source", "target"), strict=True)
        ]
        if files[0] == files[1] and found.source == found.target:
            shared = tokenizer_for(found.source, files[0])
            return shared, shared
        return tokenizer_for(found.source, files[0]), tokenizer_for(found.target, files[1])

    def _pieces(self, name: str | None, language: str | None, side: str) -> Path:
        if name is not None:
            if name != SPACES and not (self.source / name).is_file():
                raise ConversionError(f"{self.source / name} is missing")
            return self.source / name
        found = sorted(path for path in self.source.iterdir() if path.suffix in _PIECES)
        if len(found) > 1:  # one for each side: spm.en.model, spm.de.model
            found = [path for path in found if language in re.split(r"[._-]", path.stem)]
        if len(found) == 1:
            return found[0]
        reason = (
            f"what cuts its {side} into words is not known: put the sentencepiece model (*.model, *.spm) that it was "
            "trained with beside it, or say by --config FILE what it is, under tokenizer, or source_tokenizer and "
            "target_tokenizer: a sentencepiece model, a tokenizer.json whose ids are the vocabulary's, or "
            f'"{SPACES}": texts are words of the vocabulary already, separated by spaces, cut outside by whatever cut '
            "the training's (Moses, fastBPE, subword-nmt, pyonmttok)"
        )
        raise UnsupportedCheckpoint(str(self.source), [reason])


def _mapped(found: ToolkitModel) -> dict[str, Tensor]:
    """Their names -> ours. What has no place of ours keeps its name, so that `fill` reports it."""
    tensors = dict(found.tensors)
    mapped = {
        "source_embedding.tokens.weight": tensors.pop("encoder.embed_tokens.weight"),
        "target_embedding.tokens.weight": tensors.pop("decoder.embed_tokens.weight"),
        "output.weight": tensors.pop("decoder.output_projection.weight"),
    }
    if "decoder.output_projection.bias" in tensors:
        mapped["output.bias"] = tensors.pop("decoder.output_projection.bias")
    for ours, theirs in (("source", "encoder"), ("target", "decoder")):
        table = tensors.pop(f"{theirs}.embed_positions.weight", None)
        if table is not None:  # from the padding token's row on
            rows = 1 + getattr(found.architecture, theirs).max_positions
            mapped[f"{ours}_embedding.table"] = table[found.pad_id : found.pad_id + rows]
    for name in [name for name in tensors if name.rpartition(".")[0].endswith(".fc3")]:  # gate and up are one of ours
        gate = name.replace(".fc3.", ".fc1.")
        tensors[gate] = torch.cat([tensors[gate], tensors.pop(name)])
    layers = map_layers({f"model.{name}": tensor for name, tensor in tensors.items()})
    return mapped | {name.removeprefix("model."): tensor for name, tensor in layers.items()}
