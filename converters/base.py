"""load -> check -> export -> verify -> save: the same for every family.

A family's converter only loads: it maps a checkpoint onto a module written for export. A version appears in the
repository complete or not at all: everything is written into a staging folder, whose manifest comes last, and the
folder is then renamed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from torch import Tensor, nn

from converters.checkpoint import reasons_of
from converters.export import ExportedFiles, export_graphs
from converters.lowering import lower
from converters.modules.causal_graphs import LanguageModel
from converters.modules.graphs import EncoderDecoder, SearchConstants, feature_width_of
from converters.precision import to_int8
from converters.verify import Certificate, Tolerance, verify
from converters.weights import sha256_of
from serving.errors import ConversionError, UnsupportedCheckpoint
from serving.manifest import (
    MANIFEST_FILE,
    DecodingDefaults,
    File,
    Graphs,
    Limits,
    Manifest,
    Precision,
    Tokenizers,
    Vocabulary,
    Weights,
)
from serving.tokenizer import TextTokenizer

PARITY_FILE = "parity.json"
# A language model has no encoder, but may have a graph that takes in prompts: "export prefill".
STEPS = ("load", "check", "export encoder", "export step", "export score", "verify", "save")
_STAGING = ".staging-"
_VERSION = re.compile(r"[1-9][0-9]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NO_FILE = File(file="", sha256="")
_RECORDED = ("beamline", "torch", "onnx-ir", "onnxscript", "onnxruntime", "transformers", "gguf", "sentencepiece")


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
class Chat:
    """How a conversation becomes a prompt, where a model was trained for that."""

    template: str | None
    bos_token: str
    eos_token: str


NO_CHAT = Chat(None, "", "")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, ready for export, beside its original."""

    model: EncoderDecoder | LanguageModel
    original: Callable[..., Tensor]  # source, source_mask, target, or only the last -> logits, in plain PyTorch
    source_text: TextSide
    target_text: TextSide  # the same object where source and target share a vocabulary
    vocabulary: Vocabulary
    limits: Limits
    defaults: DecodingDefaults
    renormalise: bool = False
    source_languages: tuple[str, ...] = ()
    target_languages: tuple[str, ...] = ()
    description: str = ""
    chat: Chat = NO_CHAT

    @property
    def task(self) -> Literal["translate", "generate"]:
        return "translate" if isinstance(self.model, EncoderDecoder) else "generate"

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Words that no request can ever want, and that the graph itself forbids, so that no rule has to at every step.
        Only where log-probabilities are renormalised: otherwise greedy's would lack these words' share."""
        if not self.renormalise:
            return ()
        words = [word[0] for word in self.defaults.bad_words if len(word) == 1]
        return tuple(sorted({*words, *self.defaults.suppress_tokens} - set(self.vocabulary.eos_ids)))


def search_constants(loaded: Loaded) -> SearchConstants:
    eos_ids = loaded.vocabulary.eos_ids
    return SearchConstants(eos_ids, max(2, 1 + len(eos_ids)), loaded.renormalise, loaded.forbidden)


class Converter(ABC):
    family: str

    def __init__(self, source: Path) -> None:
        self.source = source

    @abstractmethod
    def load(self) -> Loaded:
        """Raises `UnsupportedCheckpoint` with every reason at once."""

    def convert(
        self,
        name: str,
        repository: Path,
        version: int | None = None,
        tolerance: Tolerance | None = None,
        advance: Callable[[str], None] = lambda step: None,
        precision: Precision = "float32",
    ) -> tuple[Manifest, Certificate]:
        """Writes repository/name/version, and says what the comparison with PyTorch found."""
        advance("load")
        loaded = self.load()
        advance("check")
        version = free_version(name, repository, version)
        if isinstance(loaded.model, nn.Module):
            loaded.model.eval()
        with staging(repository / name, version) as folder:
            tokenizers = _save_tokenizers(loaded, folder)
            self._manifest(name, version, loaded, _no_files(loaded), tokenizers)  # refused now, not after the export
            files = export_graphs(loaded.model, search_constants(loaded), folder, advance)
            manifest = self._manifest(name, version, loaded, files, tokenizers)
            advance("verify")
            certificate = verify(folder, manifest, loaded, tolerance or Tolerance())
            if precision == "int8":  # only what is proven to be the original is made smaller
                manifest, loss = to_int8(folder, manifest)
                certificate = replace(certificate, int8=loss)
            elif precision != "float32":
                manifest, check = lower(folder, manifest, precision)
                certificate = replace(certificate, half=check)
            advance("save")
            write_text(folder / PARITY_FILE, json.dumps(certificate.to_json(), indent=2) + "\n")
            write_text(folder / MANIFEST_FILE, manifest.to_json())
        return manifest, certificate

    def _manifest(
        self, name: str, version: int, loaded: Loaded, files: ExportedFiles, tokenizers: Tokenizers
    ) -> Manifest:
        try:
            return self._fill_in(name, version, loaded, files, tokenizers)
        except ValidationError as error:
            raise UnsupportedCheckpoint(str(self.source), reasons_of(error)) from error

    def _fill_in(
        self, name: str, version: int, loaded: Loaded, files: ExportedFiles, tokenizers: Tokenizers
    ) -> Manifest:
        return Manifest(
            name=name,
            version=version,
            task=loaded.task,
            family=self.family,
            graphs=files.graphs,
            weights=files.weights,
            tokenizers=tokenizers,
            state=tuple(loaded.model.state_tensors()),
            vocabulary=loaded.vocabulary,
            limits=loaded.limits,
            feature_width=feature_width_of(loaded.model),
            defaults=loaded.defaults,
            forbidden_in_graph=loaded.forbidden,
            source_languages=loaded.source_languages,
            target_languages=loaded.target_languages,
            chat_template=loaded.chat.template,
            bos_token=loaded.chat.bos_token,
            eos_token=loaded.chat.eos_token,
            description=loaded.description,
            created_with=versions(),
        )


def _no_files(loaded: Loaded) -> ExportedFiles:
    encoder = _NO_FILE if loaded.task == "translate" else None
    return ExportedFiles(Graphs(encoder=encoder, step=_NO_FILE, score=_NO_FILE), Weights(file="", sha256="", bytes=0))


def _save_tokenizers(loaded: Loaded, folder: Path) -> Tokenizers:
    vocabulary = loaded.vocabulary

    def save(side: TextSide, name: str, size: int) -> File:
        path = folder / name
        side.save(path)
        words = TextTokenizer.load(path).vocab_size
        if words > size:
            reason = f"its tokenizer has {words} words, but its embedding only {size}"
            raise UnsupportedCheckpoint("the checkpoint", [reason])
        return File(file=name, sha256=sha256_of(path))

    if loaded.source_text is loaded.target_text:
        shared = save(loaded.source_text, "tokenizer.json", min(vocabulary.source_size, vocabulary.target_size))
        return Tokenizers(source=shared, target=shared)
    return Tokenizers(
        source=save(loaded.source_text, "source_tokenizer.json", vocabulary.source_size),
        target=save(loaded.target_text, "target_tokenizer.json", vocabulary.target_size),
    )


def versions() -> dict[str, str]:
    found = {}
    for package in _RECORDED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def free_version(name: str, repository: Path, wanted: int | None) -> int:
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
def staging(model: Path, version: int) -> Iterator[Path]:
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


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
