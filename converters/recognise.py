"""Which converter reads a folder or a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from converters.base import Converter
from converters.checkpoint import read_json
from converters.families import (
    recurrent,
    recurrent_language,
    recurrent_pooled,
    reference,
    torch_recurrent,
    torch_recurrent_pooled,
    torch_transformer,
)
from converters.families.own_module import OwnModuleConverter
from converters.own.load import Origin
from converters.pooled import PooledConverter
from serving.errors import ConversionError

LANGUAGE_MODELS = ("gpt2", "llama", "mistral", "qwen2")


@dataclass(frozen=True)
class OwnFiles:
    """What lies beside one's own module."""

    weights: Path | None = None
    tokenizer: Path | None = None
    target_tokenizer: Path | None = None


def converter_for(source: Path, config: Path | None = None, own: OwnFiles | None = None) -> Converter:
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
    content = read_json(config or source / "config.json")
    kind = content.get("family") or content.get("model_type")
    if kind == reference.MODEL_TYPE:
        return reference.ReferenceConverter(source)
    if kind == recurrent.MODEL_TYPE:
        return recurrent.RecurrentConverter(source)
    if kind == torch_recurrent.FAMILY:
        return torch_recurrent.TorchRecurrentConverter(source, config or source / "config.json")
    if kind == recurrent_language.FAMILY:
        return recurrent_language.RecurrentLanguageConverter(source, config or source / "config.json")
    if kind == torch_transformer.FAMILY:
        return torch_transformer.TorchTransformerConverter(source, config or source / "config.json")
    if kind == "marian":
        from converters.families.marian import MarianConverter  # transformers takes seconds to import

        return MarianConverter(source)
    if kind in LANGUAGE_MODELS:
        return _language_model(source)
    families = (
        torch_transformer.FAMILY,
        torch_recurrent.FAMILY,
        recurrent.MODEL_TYPE,
        recurrent_language.FAMILY,
        "marian",
        *LANGUAGE_MODELS,
    )
    known = ", ".join((reference.MODEL_TYPE, *families))
    raise ConversionError(
        f"{config or source / 'config.json'}: model_type or family is {kind!r}; known: {known}. "
        "A checkpoint in other names needs a file that names its parts: --config FILE"
    )


def _own_module(origin: Origin, own: OwnFiles) -> Converter:
    if own.weights is None or own.tokenizer is None:
        raise ConversionError("one's own module needs --weights FILE (safetensors, npz) and --tokenizer FILE")
    return OwnModuleConverter(origin, own.weights, own.tokenizer, own.target_tokenizer)


def _language_model(source: Path) -> Converter:
    from converters.families.language import LanguageConverter  # as above

    return LanguageConverter(source)


def any_converter_for(source: Path, config: Path | None, own: OwnFiles) -> Converter | PooledConverter:
    """The same, or one for a model that classifies or embeds."""
    if source.is_dir() and own == OwnFiles():
        file = config or source / "config.json"
        content = read_json(file)
        kind = content.get("family") or content.get("model_type")
        if kind == recurrent_pooled.MODEL_TYPE:
            return recurrent_pooled.RecurrentPooledConverter(source)
        if kind == torch_recurrent_pooled.FAMILY:
            return torch_recurrent_pooled.TorchRecurrentPooledConverter(source, file)
    return converter_for(source, config, own)
