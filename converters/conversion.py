"""load -> check -> export -> verify -> save: the same for every family and for every kind of model.

A version appears in the repository complete or not at all: everything is written into a staging folder, whose manifest
comes last, and the folder is then renamed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from beamline.converters.certificate import ParityCertificate
from beamline.converters.weights import sha256_of
from beamline.serving.contract.manifest import MANIFEST_FILE, AnyManifest, File, Precision
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from beamline.serving.text.tokenizer import TextTokenizer

PARITY_FILE = "parity.json"
# A language model has no encoder, but may have a graph that takes in prompts: "export prefill".
STEPS = ("load", "check", "export encoder", "export step", "export score", "verify", "save")
_STAGING = ".staging-"
_VERSION = re.compile(r"[1-9][0-9]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RECORDED = ("beamline", "torch", "onnx-ir", "onnxscript", "onnxruntime", "transformers", "gguf", "sentencepiece")

LoadedType = TypeVar("LoadedType")
ToleranceType = TypeVar("ToleranceType")
ManifestType = TypeVar("ManifestType", bound=AnyManifest)
CertificateType = TypeVar("CertificateType", bound=ParityCertificate)


class TextSide(ABC):
    """One side's tokenizer: how to write it for the server, and what the original does, for comparison."""

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """By the original tokenizer."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """By the original tokenizer."""


@dataclass(frozen=True)
class Draft:
    """A version in the making."""

    name: str
    version: int
    folder: Path
    precision: Precision
    advance: Callable[[str], None]  # says which of `STEPS` begins
    typical: Sequence[str] = ()  # lines of text, by which 8-bit activations get fixed scales


class Conversion(ABC, Generic[LoadedType, ToleranceType, ManifestType, CertificateType]):
    family: str

    def __init__(self, source: Path) -> None:
        self.source = source

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
    ) -> tuple[ManifestType, CertificateType]:
        """Writes repository/name/version, and says what the comparison with PyTorch found. `typical`: text by which the
        activations of an int8 model get fixed scales."""
        if typical and precision != "int8":
            raise ConversionError(f"there is nothing to calibrate in {precision}: that is for --precision int8")
        advance("load")
        loaded = self.load()
        advance("check")
        version = _free_version(name, repository, version)
        with _staging(repository / name, version) as folder:
            draft = Draft(name, version, folder, precision, advance, typical)
            manifest, certificate = self.make(loaded, draft, tolerance)
            advance("save")
            _write_text(folder / PARITY_FILE, json.dumps(certificate.to_json(), indent=2) + "\n")
            _write_text(folder / MANIFEST_FILE, manifest.to_json())
        return manifest, certificate

    def save_tokenizer(self, side: TextSide, path: Path, vocabulary_size: int) -> File:
        side.save(path)
        words = TextTokenizer.load(path).vocab_size
        if words > vocabulary_size:
            reason = f"its tokenizer has {words} words, but its embedding only {vocabulary_size}"
            raise UnsupportedCheckpoint(str(self.source), [reason])
        return File(file=path.name, sha256=sha256_of(path))


def versions() -> dict[str, str]:
    found = {}
    for package in _RECORDED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _free_version(name: str, repository: Path, wanted: int | None) -> int:
    if not _NAME.fullmatch(name):
        raise ConversionError(
            f"{name!r} can't be a model's name: up to 100 letters, digits, '.', '_', '-'; a letter or digit first"
        )
    folder = repository / name
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = {int(each) for each in names if _VERSION.fullmatch(each)}
    if wanted is None:
        return max(taken, default=0) + 1
    if wanted < 1:
        raise ConversionError(f"a version is a whole number from 1 on, not {wanted}")
    if wanted in taken:
        raise ConversionError(
            f"{folder / str(wanted)} already exists; choose another --version, or none for the next one"
        )
    return wanted


@contextmanager
def _staging(model: Path, version: int) -> Iterator[Path]:
    """A folder that becomes the version if all goes well, and is removed if it doesn't. A killed conversion leaves one
    that no server looks at; the next conversion of this model sweeps it away."""
    model_existed = model.is_dir()
    model.mkdir(parents=True, exist_ok=True)
    folder = model / f"{_STAGING}{os.getpid()}"
    for stale in model.glob(f"{_STAGING}*"):
        # One with our own number was left by another process: in a container, each conversion may get the same.
        if stale == folder or not _running(stale.name.removeprefix(_STAGING)):
            shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(model / str(version))
        except OSError as error:  # somebody else made this version meanwhile
            raise ConversionError(f"{model / str(version)} can't be made: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if not model_existed and not any(model.iterdir()):
            model.rmdir()
        raise


def _running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
