"""Text to ids and back by the sentencepiece library, so that every id is the original's.

Many threads may share one of these: the library's own batches share a model between threads, and
its binding gives up the interpreter lock while it encodes and decodes (read in the source of 0.2.2).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence

from sentencepiece import SentencePieceProcessor

from beamline.serving.contract.manifest import Id, Record

_LANGUAGE_CODE = re.compile(r">>.*?<<", re.DOTALL)
_NOTHING = re.compile(r"(?!)")
_SPACE = "\u2581"  # how sentencepiece writes it
# Hugging Face's clean_up_tokenization, in its order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class MarianSpec(Record):
    """What Hugging Face's MarianTokenizer does around sentencepiece: its ids are those of vocab.json."""

    vocabulary: dict[str, Id]
    unknown: Id  # of what is not in the vocabulary
    added: dict[str, Id]  # read as one token wherever they stand in a text: </s>, <unk>, <pad>
    hidden: tuple[Id, ...]  # leave no trace in a decoded text
    decoding: str | None = None  # base64 of the model that decodes, where that is not the one that encodes
    clean_up_spaces: bool = False
    reads_language_codes: bool = True  # a text may begin with one: >>de<<
    # As in fairseq, pieces are words of a line: a space of any kind that sentencepiece has left in one separates.
    splits_at_spaces: bool = False


class SentencePieceSpec(Record):
    """The value of "beamline" in a tokenizer's JSON file."""

    sentencepiece: str  # base64 of the .model or .spm file
    prefix: tuple[Id, ...] = ()  # ids that stand before every encoded text
    suffix: tuple[Id, ...] = ()  # ... and after it
    marian: MarianSpec | None = None


class SentencePieceText:
    def __init__(self, spec: SentencePieceSpec) -> None:
        self._spec = spec
        self._model = _processor(spec.sentencepiece)
        self.vocab_size = self._model.get_piece_size()

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids = self._ids(text)
        return [*self._spec.prefix, *ids, *self._spec.suffix] if special else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The library's own batches start threads anew at every call.
        return [self.encode(text, special=True) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([i for i in ids if 0 <= i < self.vocab_size]))

    def token(self, index: int) -> str:
        return self._model.id_to_piece(index) if 0 <= index < self.vocab_size else ""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids


class MarianText(SentencePieceText):
    def __init__(self, spec: SentencePieceSpec, marian: MarianSpec) -> None:
        super().__init__(spec)
        self._decoding = _processor(marian.decoding) if marian.decoding else self._model
        self._clean_up = _CLEAN_UP if marian.clean_up_spaces else ()
        self._vocabulary = {**marian.vocabulary, **marian.added}
        self._unknown = marian.unknown
        self._splits = marian.splits_at_spaces
        self._code = _LANGUAGE_CODE if marian.reads_language_codes else _NOTHING
        longest_first = sorted(marian.added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or _NOTHING.pattern})")
        # An added token takes its id from any other. An id that vocab.json leaves out has no text.
        self._tokens = {index: token for token, index in marian.vocabulary.items()}
        self._tokens |= {index: token for token, index in marian.added.items()}
        self._hidden = frozenset(marian.hidden)
        self.vocab_size = max(self._tokens, default=-1) + 1

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._tokens[i] for i in ids if i in self._tokens and i not in self._hidden]
        text = str(self._decoding.decode(pieces)).replace(_SPACE, " ").strip()
        for spaced, closed in self._clean_up:
            text = text.replace(spaced, closed)
        return text

    def token(self, index: int) -> str:
        return self._tokens.get(index, "")

    def _ids(self, text: str) -> list[int]:
        return [self._vocabulary.get(piece, self._unknown) for piece in self._pieces(text)]

    def _pieces(self, text: str) -> Iterator[str]:
        # Every second part is an added token.
        for number, part in enumerate(self._added.split(text)):
            if number % 2:
                yield part
                continue
            if code := self._code.match(part):
                yield code.group()
                part = part[code.end() :]
            # Characters that the model does not know come as they are: a vocabulary that two
            # languages share may have them.
            pieces: list[str] = self._model.encode(part, out_type=str)
            yield from " ".join(pieces).split() if self._splits else pieces


def _processor(encoded: str) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(base64.b64decode(encoded, validate=True))
    return processor
