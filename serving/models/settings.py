"""What an operator says about one model: `serving.toml` beside its version folders. Every key may be left out.

versions = "newest"      # or "all", or a list of numbers: only these
slots = 16               # requests that are decoded at once
queue = 256              # requests that wait behind them
engines = 2              # that share the CPU's cores: more answers from a small model, slower ones from a large one
cache_entries = 4096     # that one request may need: its prompt once, and all that each of its beams or samples writes
device = "auto"          # or "cpu", "cuda", "tensorrt"
prompt_slowdown = 8.0    # of running streams, at most, while prompts are taken in: more, and prompts are in sooner
precision = "float32"    # refuse a version that is stored otherwise
shortlist = true         # only words that its lexical table (`beamline shortlist`) has for a source; on the CPU
default = true           # for calls that name no model

[cuda]                   # options of ONNX Runtime's CUDA provider, as text
gpu_mem_limit = "4294967296"

[defaults]               # of decoding options, over those of the manifest
beam_size = 2
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from beamline.serving.contract.files import read_text
from beamline.serving.contract.manifest import (
    AnyManifest,
    DecodingDefaults,
    Manifest,
    PooledManifest,
    Precision,
    StateKind,
)
from beamline.serving.contract.validation import sentence_of
from beamline.serving.errors import ModelError

SETTINGS_FILE = "serving.toml"
MOST_SLOWDOWN = 1000.0
_SLOWDOWN, _ENTRIES = "prompt_slowdown", "cache_entries"

Number = Annotated[int, Field(ge=1, strict=True)]  # neither "3" nor true
Versions = Literal["newest", "all"] | Annotated[tuple[Number, ...], Field(min_length=1)]


class ModelSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: Versions | None = None  # None: as the command line says
    slots: Annotated[Number, Field(le=4096)] | None = None
    queue: Annotated[Number, Field(le=1_000_000)] | None = None
    engines: Annotated[Number, Field(le=64)] | None = None  # on the CPU
    prompt_slowdown: Annotated[float, Field(ge=1, le=MOST_SLOWDOWN, strict=True)] | None = None  # of a language model
    cache_entries: Number | None = (
        None  # None: what an encoder-decoder's longest and widest search needs; else 2 contexts
    )
    device: Literal["auto", "cpu", "cuda", "tensorrt"] | None = None  # None: as the command line says
    precision: Precision | None = None
    shortlist: Annotated[bool, Field(strict=True)] = False
    default: Annotated[bool, Field(strict=True)] = False
    cuda: dict[str, str] = Field(default_factory=dict)  # options of ONNX Runtime's CUDA provider
    defaults: dict[str, Any] = Field(default_factory=dict)  # keys and values of `DecodingDefaults`


def read_settings(folder: Path) -> ModelSettings:
    """The settings of a model's folder, or a `ModelError` that names the file and says what is allowed."""
    path = folder / SETTINGS_FILE
    try:
        content = tomllib.loads(read_text(path))
    except FileNotFoundError:
        return ModelSettings()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise ModelError(f"{path} is not TOML: {error}") from error
    _refuse_unknown(path, "", content, list(ModelSettings.model_fields))
    defaults = content.get("defaults")
    if isinstance(defaults, dict):
        _refuse_unknown(path, "defaults.", defaults, list(DecodingDefaults.model_fields))
    try:
        return ModelSettings.model_validate(content)
    except ValidationError as error:
        raise ModelError(f"{path} is wrong: {sentence_of(error)}") from error


def _refuse_unknown(path: Path, table: str, content: dict[str, Any], known: Sequence[str]) -> None:
    unknown = [f"{table}{key}" for key in content if key not in known]
    if unknown:
        raise ModelError(f"{path} has unknown keys: {', '.join(unknown)}; known are {', '.join(known)}")


def problems_of(folder: Path, manifests: Sequence[AnyManifest]) -> list[str]:
    """Of the settings of a model that has these versions: all that can be seen without loading it."""
    path = folder / SETTINGS_FILE
    try:
        settings = read_settings(folder)
    except ModelError as error:
        return [str(error)]
    on_disk = {manifest.version: manifest for manifest in manifests}
    asked = settings.versions if isinstance(settings.versions, tuple) else ()
    problems = [f"{path} asks for version {version}, which is not there" for version in asked if version not in on_disk]
    for version in asked or (on_disk if settings.versions == "all" else sorted(on_disk)[-1:]):
        if version in on_disk:
            try:
                check(settings, on_disk[version], path)
            except ModelError as error:
                problems.append(str(error))
    return problems


def check(settings: ModelSettings, manifest: AnyManifest, path: Path) -> None:
    """Raises a `ModelError` where the version can't be served as asked."""
    if not isinstance(manifest, PooledManifest):
        apply(settings, manifest, path)
        return
    decoding = {
        "[defaults]": settings.defaults,
        "a shortlist": settings.shortlist,
        "engines": settings.engines,
        _SLOWDOWN: settings.prompt_slowdown,
        _ENTRIES: settings.cache_entries,
    }
    if has := [name for name, value in decoding.items() if value]:
        raise ModelError(f"{path} has {' and '.join(has)}, but {manifest.name} decodes nothing")


def apply(settings: ModelSettings, manifest: Manifest, path: Path) -> Manifest:
    """The manifest with the operator's defaults; a `ModelError` where the version can't be served as asked."""
    stored = stored_precision(manifest)
    if settings.precision not in (None, stored):
        raise ModelError(
            f"{path} asks for precision {settings.precision}, but {manifest.name} version {manifest.version} is "
            f"stored in {stored}: precision is decided by the conversion"
        )
    if settings.shortlist and manifest.shortlist is None:
        raise ModelError(
            f"{path} asks for a shortlist, but {manifest.name} version {manifest.version} has none: make one with "
            "beamline shortlist"
        )
    if settings.prompt_slowdown is not None and manifest.graphs.prefill is None:
        raise ModelError(f"{path} has {_SLOWDOWN}, but {manifest.name} version {manifest.version} takes in no prompts")
    longest = manifest.limits.max_target_length
    if settings.cache_entries is not None and settings.cache_entries < longest:
        raise ModelError(
            f"{path} has {_ENTRIES} {settings.cache_entries}, but a single beam of {manifest.name} version "
            f"{manifest.version} may need {longest}: it must be at least that"
        )
    if not settings.defaults:
        return manifest
    merged = {**manifest.defaults.model_dump(), **settings.defaults}
    try:
        return type(manifest).model_validate({**manifest.model_dump(), "defaults": merged})
    except ValidationError as error:
        raise ModelError(f"{path} does not fit version {manifest.version}: {sentence_of(error)}") from error


def stored_precision(manifest: Manifest) -> Precision:
    kept = [tensor.dtype for tensor in manifest.state if tensor.kind is not StateKind.MEMORY]
    return "float16" if "float16" in kept else manifest.precision
