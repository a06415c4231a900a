"""A tokenizer that a user names on the command line: Hugging Face's tokenizer.json, or a sentencepiece model."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from beamline.converters.conversion import TextSide
from beamline.converters.families.sentencepiece_text import SentencePieceText
from beamline.serving.errors import ConversionError


class TokenizerJson(TextSide):
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


def read_tokenizer(path: Path, *, add_eos: bool = True) -> TextSide:
    """A sentencepiece model's texts may end with its end token; a tokenizer.json says itself what is added."""
    if not path.is_file():
        raise ConversionError(f"{path} is missing: a tokenizer.json or a sentencepiece model is needed")
    return TokenizerJson(path) if path.suffix == ".json" else SentencePieceText(path, add_eos=add_eos)
