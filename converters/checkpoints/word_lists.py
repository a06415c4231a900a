"""Vocabularies that are lists of words, as fairseq and OpenNMT-py have them, and what cuts a text into these words.

sentencepiece cuts it in the server as it did in training. What Moses, fastBPE, subword-nmt or pyonmttok cut stays
outside: then a text is words of the list, separated by spaces, as these toolkits themselves read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from beamline.converters.checkpoints.sentencepiece_files import from_word_list
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer, TokenizerJson
from beamline.serving.errors import UnsupportedCheckpoint
from beamline.serving.text.tokenizer import MarianSpec

SPACES = "spaces"  # in the place of a tokenizer's file: the words are separated already
_KNOWN = 0.5  # of the list's words, sentencepiece has made at least so many


@dataclass(frozen=True)
class WordList:
    ids: dict[str, int]
    unknown: int
    hidden: tuple[int, ...]  # leave no trace in a text
    suffix: tuple[int, ...] = ()  # behind every source
    splits_at_spaces: bool = False  # those of any kind, which sentencepiece may leave in a piece

    @property
    def words(self) -> list[str]:
        return [word for word, index in self.ids.items() if index not in self.hidden]


def tokenizer_for(words: WordList, file: Path) -> OriginalTokenizer:
    """`file` is a sentencepiece model, a tokenizer.json whose ids are the list's, or is called "spaces"."""
    if file.name == SPACES:
        return SpacedWords(words)
    return TokenizerJson(file) if file.suffix == ".json" else Pieces(words, file)


class Pieces(OriginalTokenizer):
    """sentencepiece's pieces, by their places in the list."""

    def __init__(self, words: WordList, file: Path) -> None:
        self._list = words
        spec = MarianSpec(
            vocabulary=words.ids,
            unknown=words.unknown,
            added={},
            hidden=words.hidden,
            reads_language_codes=False,
            splits_at_spaces=words.splits_at_spaces,
        )
        self._converted = from_word_list(file, spec, words.suffix)
        self._original = SentencePieceProcessor(model_file=str(file))
        pieces = {self._original.id_to_piece(index) for index in range(self._original.get_piece_size())}
        known = [word for word in words.words if word in pieces]
        if len(known) < _KNOWN * len(words.words):
            reason = (
                f"only {len(known)} of the vocabulary's {len(words.words)} words are its pieces: "
                "it is not the model that the text was cut with"
            )
            raise UnsupportedCheckpoint(str(file), [reason])

    def save(self, path: Path) -> None:
        self._converted.save(path)

    def encode(self, text: str) -> list[int]:
        pieces = self._original.encode(text, out_type=str)
        pieces = " ".join(pieces).split() if self._list.splits_at_spaces else pieces
        return [*(self._list.ids.get(piece, self._list.unknown) for piece in pieces), *self._list.suffix]

    def decode(self, ids: list[int]) -> str:
        names = {index: word for word, index in self._list.ids.items() if index not in self._list.hidden}
        return str(self._original.decode([names[index] for index in ids if index in names])).strip()


class SpacedWords(OriginalTokenizer):
    def __init__(self, words: WordList) -> None:
        self._list = words

    def save(self, path: Path) -> None:
        names = {index: word for word, index in self._list.ids.items()}
        tokenizer = Tokenizer(models.WordLevel(self._list.ids, unk_token=names[self._list.unknown]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = [AddedToken(names[index], special=True, single_word=True) for index in self._list.hidden]
        tokenizer.add_special_tokens(special)
        ends = [(names[index], index) for index in self._list.suffix]
        if ends:
            template = " ".join(["$A", *(name for name, _ in ends)])
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
        path.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return [*(self._list.ids.get(word, self._list.unknown) for word in text.split()), *self._list.suffix]

    def decode(self, ids: list[int]) -> str:
        names = {index: word for word, index in self._list.ids.items() if index not in self._list.hidden}
        return " ".join(names[index] for index in ids if index in names)
