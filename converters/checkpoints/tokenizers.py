"""Tokenizers as checkpoints bring them: a sentencepiece model, a tokenizer.json, or one that transformers loads."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from beamline.converters.checkpoints.sentencepiece_files import from_sentencepiece
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from beamline.serving.text.tokenizer import ByteSpec


class OriginalTokenizer(ABC):
    """The tokenizer of a source or a target: how to write it for the server, and what the original does."""

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """By the original tokenizer."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """By the original tokenizer."""


class SentencePieceTokenizer(OriginalTokenizer):
    def __init__(self, path: Path, *, add_eos: bool) -> None:
        if not path.is_file():
            raise ConversionError(f"{path} is missing: a sentencepiece model is needed")
        self._converted = from_sentencepiece(path, add_eos=add_eos)
        self._original = SentencePieceProcessor(model_file=str(path))
        self._add_eos = add_eos

    def save(self, path: Path) -> None:
        self._converted.save(path)

    def encode(self, text: str) -> list[int]:
        return list(self._original.encode(text, add_eos=self._add_eos))

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids))


class TokenizerJson(OriginalTokenizer):
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._original = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exceptions
            raise ConversionError(f"{path} is no tokenizer.json: {error}") from error
        self._original.no_truncation()
        self._original.no_padding()

    def save(self, path: Path) -> None:
        shutil.copyfile(self._path, path)

    def encode(self, text: str) -> list[int]:
        return list(self._original.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids))


class FastTokenizer(OriginalTokenizer):
    """A tokenizer that transformers loaded by the `tokenizers` library, which also serves it."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def save(self, path: Path) -> None:
        backend = getattr(self._original, "backend_tokenizer", None)
        if backend is None:
            kind = type(self._original).__name__
            raise UnsupportedCheckpoint(
                "the checkpoint", [f"its tokenizer ({kind}) can't be written as tokenizer.json"]
            )
        path.write_text(backend.to_str(), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return list(self._original(text)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids, skip_special_tokens=True))


class ByteTokenizer(OriginalTokenizer):
    """ByT5's, whose tokens are the bytes of a text."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def save(self, path: Path) -> None:
        added = self._original.added_tokens_decoder.values()
        spec = ByteSpec(
            offset=self._original.offset,
            suffix=(self._original.eos_token_id,),
            added=self._original.added_tokens_encoder,
            hidden=tuple(self._original.all_special_ids),
            greedy=tuple(each.content for each in added if each.lstrip and each.rstrip),
        )
        path.write_text(json.dumps({"beamline": {"bytes": spec.model_dump()}}) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return list(self._original(text)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids, skip_special_tokens=True))


def read_tokenizer(path: Path, *, add_eos: bool = True) -> OriginalTokenizer:
    """A sentencepiece model's texts may end with its end token; a tokenizer.json says itself what is added."""
    if not path.is_file():
        raise ConversionError(f"{path} is missing: a tokenizer.json or a sentencepiece model is needed")
    return TokenizerJson(path) if path.suffix == ".json" else SentencePieceTokenizer(path, add_eos=add_eos)
