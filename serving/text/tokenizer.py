"""Text to ids and back, for one side of a model.

A JSON file with the key "beamline" (the converter writes such files) holds a sentencepiece model, and sentencepiece
answers, or says that tokens are bytes. Any other is a Hugging Face tokenizer.json, for the Rust `tokenizers` library,
which is not exact for sentencepiece models. All may be used from many threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from beamline.serving.contract.files import read_text
from beamline.serving.errors import InvalidRequest, ModelError
from beamline.serving.text.byte_text import ByteSpec, ByteText
from beamline.serving.text.sentencepiece import MarianSpec, MarianText, SentencePieceSpec, SentencePieceText

__all__ = ["ByteSpec", "MarianSpec", "SentencePieceSpec", "TextTokenizer"]


class _Engine(Protocol):
    vocab_size: int

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token(self, index: int) -> str: ...


class TextTokenizer:
    """Ids that are out of range decode to nothing: an embedding is often padded beyond the vocabulary."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        path = Path(path)
        try:
            return cls.from_json(json.loads(read_text(path)))
        except Exception as error:  # the Rust library raises bare Exceptions
            raise ModelError(f"{path} is not a tokenizer that can be served: {error!r}") from error

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TextTokenizer:
        if "beamline" not in value:
            return cls(_HuggingFace(value))
        if "bytes" in value["beamline"]:
            return cls(ByteText(ByteSpec.model_validate(value["beamline"]["bytes"])))
        spec = SentencePieceSpec.model_validate(value["beamline"])
        return cls(SentencePieceText(spec) if spec.marian is None else MarianText(spec, spec.marian))

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the conversion declared (an end of sentence, mostly)."""
        return self._engine.encode(_checked(text), special=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._engine.encode_batch([_checked(text) for text in texts])

    def encode_prefix(self, text: str) -> list[int]:
        """Without special tokens: the beginning of a text that goes on."""
        return self._engine.encode(_checked(text), special=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens leave no trace in the text."""
        return self._engine.decode([int(i) for i in ids])

    def token(self, index: int) -> str:
        return self._engine.token(int(index))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [self._engine.token(int(i)) for i in ids]


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has a lone surrogate at character {error.start}") from error
    return text


class _HuggingFace:
    def __init__(self, value: dict[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps(value))
        # Many published files cut at the length that training used, silently. The server decides on lengths.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1

    def encode(self, text: str, *, special: bool) -> list[int]:
        # As a batch of one, which the library encodes without the interpreter's lock: nobody waits for a large text.
        return list(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size]))

    def token(self, index: int) -> str:
        # A negative index is an OverflowError in the Rust library.
        return self._tokenizer.id_to_token(index) or "" if index >= 0 else ""
