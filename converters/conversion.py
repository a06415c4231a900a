"""load -> check -> export -> verify -> save: the same five beats for every family and for every task.

A version appears in the repository complete or not at all (`version/folder.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

from beamline.converters.certificate.parity import ParityCertificate
from beamline.converters.certificate.progress import Each, silently
from beamline.converters.checkpoints.source import Source
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
from beamline.converters.version.folder import free_version, staging, write_text
from beamline.converters.version.weights import sha256_of
from beamline.serving.contract.manifest import MANIFEST_FILE, AnyManifest, File, Precision
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from beamline.serving.text.tokenizer import TextTokenizer
from beamline.version import beamline_version

PARITY_FILE = "parity.json"
# A language model has no encoder, but may have a graph that takes in prompts: "export prefill".
STEPS = ("load", "check", "export encoder", "export step", "export score", "verify", "save")
_RECORDED = ("torch", "onnx-ir", "onnxscript", "onnxruntime", "transformers", "gguf", "sentencepiece")

LoadedType = TypeVar("LoadedType")
ToleranceType = TypeVar("ToleranceType")
ManifestType = TypeVar("ManifestType", bound=AnyManifest)
CertificateType = TypeVar("CertificateType", bound=ParityCertificate)


@dataclass(frozen=True)
class Draft:
    """A version in the making."""

    name: str
    version: int
    folder: Path
    precision: Precision
    advance: Callable[[str], None]  # says which of `STEPS` begins
    typical: Sequence[str] = ()  # lines of text, by which 8-bit activations get fixed scales
    each: Each = silently  # goes through what is compared
    grid: str = "whole"  # how much that is, of `GRIDS`


class Conversion(ABC, Generic[LoadedType, ToleranceType, ManifestType, CertificateType]):
    family: str  # as the manifest names it
    model_types: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]

    def __init__(self, source: Path) -> None:
        self.source = source

    @classmethod
    def recognises(cls, source: Source) -> bool:
        return source.model_type in cls.model_types

    @classmethod
    def from_source(cls, source: Source) -> Self:
        return cls(source.path)

    @abstractmethod
    def load(self) -> LoadedType:
        """Raises `UnsupportedCheckpoint` with every reason at once."""

    @abstractmethod
    def make(
        self, loaded: LoadedType, draft: Draft, tolerance: ToleranceType | None
    ) -> tuple[ManifestType, CertificateType]:
        """Writes all files but the manifest and the certificate, and proves that they are the original."""

    def convert(
        self,
        name: str,
        repository: Path,
        version: int | None = None,
        tolerance: ToleranceType | None = None,
        advance: Callable[[str], None] = lambda step: None,
        precision: Precision = "float32",
        typical: Sequence[str] = (),
        each: Each = silently,
        grid: str = "whole",
    ) -> tuple[ManifestType, CertificateType]:
        """Writes repository/name/version, and says what the comparison with PyTorch found. `typical`: text by which the
        activations of an int8 model get fixed scales. `grid`: how much is compared."""
        if typical and precision != "int8":
            raise ConversionError(f"there is nothing to calibrate in {precision}: that is for --precision int8")
        free_version(name, repository, version)  # refused before the work begins
        advance("load")
        loaded = self.load()
        advance("check")
        version = free_version(name, repository, version)
        with staging(repository / name, version) as folder:
            draft = Draft(name, version, folder, precision, advance, typical, each, grid)
            manifest, certificate = self.make(loaded, draft, tolerance)
            advance("save")
            write_text(folder / PARITY_FILE, json.dumps(certificate.to_json(), indent=2) + "\n")
            write_text(folder / MANIFEST_FILE, manifest.to_json())
        return manifest, certificate

    def save_tokenizer(self, tokenizer: OriginalTokenizer, path: Path, vocabulary_size: int) -> File:
        tokenizer.save(path)
        words = TextTokenizer.load(path).vocab_size
        if words > vocabulary_size:
            reason = f"its tokenizer has {words} words, but its embedding only {vocabulary_size}"
            raise UnsupportedCheckpoint(str(self.source), [reason])
        return File(file=path.name, sha256=sha256_of(path))


def versions() -> dict[str, str]:
    found = {"beamline": beamline_version()}
    for package in _RECORDED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
