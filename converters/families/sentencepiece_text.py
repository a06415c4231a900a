"""A sentencepiece model as a `TextSide`."""

from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor

from beamline.converters.conversion import TextSide
from beamline.converters.tokenization import from_sentencepiece
from beamline.serving.errors import ConversionError


class SentencePieceText(TextSide):
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
