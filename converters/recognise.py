"""Which converter reads a folder or a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from beamline.converters.base import Converter
from beamline.converters.checkpoint import read_json
from beamline.converters.families import (
    recurrent,
    recurrent_language,
    recurrent_pooled,
    reference,
    torch_recurrent,
    torch_recurrent_pooled,
    torch_transformer,
)
from beamline.converters.families.own_module import OwnModuleConverter
from beamline.converters.own.load import Origin
from beamline.converters.pooled import PooledConverter
from beamline.serving.errors import ConversionError

AnyConverter = Converter | PooledConverter
LANGUAGE_MODELS = ("gpt2", "llama", "mistral", "qwen2")


@dataclass(frozen=True)
class OwnFiles:
    """What lies beside one's own module."""

    weights: Path | None = None
    tokenizer: Path | None = None
    target_tokenizer: Path | None = None


_BY_KIND: dict[str, Callable[[Path, Path], AnyConverter]] = {
    reference.MODEL_TYPE: lambda source, config: reference.ReferenceConverter(source),
    recurrent.MODEL_TYPE: lambda source, config: recurrent.RecurrentConverter(source),
    recurrent_pooled.MODEL_TYPE: lambda source, config: recurrent_pooled.RecurrentPooledConverter(source),
    torch_transformer.FAMILY: torch_transformer.TorchTransformerConverter,
    torch_recurrent.FAMILY: torch_recurrent.TorchRecurrentConverter,
    torch_recurrent_pooled.FAMILY: torch_recurrent_pooled.TorchRecurrentPooledConverter,
    recurrent_language.FAMILY: recurrent_language.RecurrentLanguageConverter,
    "marian": lambda source, config: _marian(source),
    **dict.fromkeys(LANGUAGE_MODELS, lambda source, config: _language_model(source)),
}


def any_converter_for(source: Path, config: Path | None = None, own: OwnFiles | None = None) -> AnyConverter:
    """By the family that the config names, or the model type of `config.json`; `file.py:build` is one's own module."""
    origin = Origin.parse(str(source))
    if origin is not None:
        return _own_module(origin, own or OwnFiles())
    if own is not None and own != OwnFiles():
        raise ConversionError(f"--weights and --tokenizer are for one's own module (file.py:build); {source} is none")
    if source.suffix == ".gguf" and source.is_file():
        return _language_model(source)
    if not source.is_dir():
        raise ConversionError(f"{source} is neither a folder with a checkpoint nor a GGUF file")
    file = config or source / "config.json"
    content = read_json(file)
    kind = content.get("family") or content.get("model_type")
    if not isinstance(kind, str) or kind not in _BY_KIND:
        raise ConversionError(
            f"{file}: model_type or family is {kind!r}; known: {', '.join(_BY_KIND)}. "
            "A checkpoint in other names needs a file that names its parts: --config FILE"
        )
    return _BY_KIND[kind](source, file)


def converter_for(source: Path, config: Path | None = None, own: OwnFiles | None = None) -> Converter:
    """The same, of a model that writes."""
    found = any_converter_for(source, config, own)
    if not isinstance(found, Converter):
        raise ConversionError(f"{source} is a model that only classifies or embeds")
    return found


def _own_module(origin: Origin, own: OwnFiles) -> Converter:
    if own.weights is None or own.tokenizer is None:
        raise ConversionError("one's own module needs --weights FILE (safetensors, npz) and --tokenizer FILE")
    return OwnModuleConverter(origin, own.weights, own.tokenizer, own.target_tokenizer)


def _marian(source: Path) -> Converter:
    from beamline.converters.families.marian import MarianConverter  # transformers takes seconds to import

    return MarianConverter(source)


def _language_model(source: Path) -> Converter:
    from beamline.converters.families.language import LanguageConverter  # as above

    return LanguageConverter(source)
