"""Our own checkpoints: `config.json`, `model.safetensors` and a sentencepiece model, as `examples/translation` writes
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from beamline.converters.checkpoints.files import reasons_of
from beamline.converters.checkpoints.generation_config import stated_defaults
from beamline.converters.checkpoints.tokenizers import SentencePieceTokenizer
from beamline.converters.modules.protocols import EncoderDecoder
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.contract.manifest import Limits, Vocabulary
from beamline.serving.errors import UnsupportedCheckpoint

TOKENIZER_FILE = "spm.model"
MAX_BEAM_SIZE = 16
_BESIDE_THE_CONFIG = {"model_type", "description", "source_language", "target_language", "decoding"}


class Checked(Protocol):
    """A configuration that knows what is wrong with it."""

    def problems(self) -> list[str]: ...
    @classmethod
    def field_names(cls) -> set[str]: ...


class Architecture(Checked, Protocol):
    """What the configurations of our encoder-decoders have in common."""

    @property
    def source_vocab_size(self) -> int: ...
    @property
    def target_vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def decoder_start_id(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def share_embeddings(self) -> bool: ...
    @property
    def tie_output(self) -> bool: ...


AnyConfig = TypeVar("AnyConfig", bound=Checked)


def loaded(
    folder: Path, content: dict[str, Any], config: Architecture, model: EncoderDecoder, original: nn.Module
) -> LoadedModel:
    """A module of ours with what lies beside its weights."""
    tokenizer = SentencePieceTokenizer(folder / TOKENIZER_FILE, add_eos=True)
    return LoadedModel(
        model=model,
        original=original,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        vocabulary=vocabulary_of(config),
        limits=limits_of(config),
        defaults=stated_defaults(content.get("decoding", {}), limits_of(config), str(folder)),
        source_languages=_languages(content, "source_language"),
        target_languages=_languages(content, "target_language"),
        description=content.get("description", ""),
    )


def config_of(kind: type[AnyConfig], content: dict[str, object], folder: Path) -> AnyConfig:
    """Our module's configuration out of `config.json`, or every reason against it."""
    names = kind.field_names()
    reasons = [f"config.json: {name!r} is not known" for name in content if name not in names | _BESIDE_THE_CONFIG]
    values = {name: value for name, value in content.items() if name in names}
    try:
        config = TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
        reasons += [f"config.json: {problem}" for problem in config.problems()]
    except ValidationError as error:
        reasons += reasons_of(error, "config.json")
    if reasons:
        raise UnsupportedCheckpoint(str(folder), reasons)
    return config


def with_tied(tensors: dict[str, Tensor], config: Architecture, target: str, source: str) -> dict[str, Tensor]:
    """A tied tensor is stored once; the module wants it under each of its names."""
    aliases = [source] * config.share_embeddings + ["output.weight"] * config.tie_output
    stored = next((tensors[name] for name in (target, *aliases) if name in tensors), None)
    if stored is not None:
        tensors = {**dict.fromkeys((target, *aliases), stored), **tensors}
    return tensors


def _languages(content: dict[str, object], key: str) -> tuple[str, ...]:
    value = content.get(key)
    return (str(value),) if value else ()


def vocabulary_of(config: Architecture) -> Vocabulary:
    return Vocabulary(
        source_size=config.source_vocab_size,
        target_size=config.target_vocab_size,
        pad_id=config.pad_id,
        eos_ids=(config.eos_id,),
        decoder_start_id=config.decoder_start_id,
    )


def limits_of(config: Architecture) -> Limits:
    return limits_for(config.max_positions, config.target_vocab_size)


def limits_for(max_positions: int, vocab_size: int) -> Limits:
    return Limits(
        max_source_length=max_positions,
        max_target_length=max_positions,
        max_beam_size=min(MAX_BEAM_SIZE, vocab_size // 4),
    )
