"""A long text as parts that a model can read, and their translations in the layout of the text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from beamline.serving.text.model_card import Tokenizer
from beamline.serving.text.sentences import sentence_spans

_CLAUSE_END = re.compile(r"[,;:،؛–—](?=\s)|[，、；：]")
_SPACE = re.compile(r"\s")
_CJK_END = frozenset("。！？｡，、；：」』）】》")
_WIDE = frozenset("WF")  # the East Asian widths of scripts that are written without spaces
# Parts that are cut come out of different lengths; aiming a bit lower saves most second cuts.
_HEADROOM = 1.25


@dataclass(frozen=True, slots=True)
class Layout:
    """text == lead + parts[0] + gaps[0] + parts[1] + gaps[1] + ...; lead and gaps are only white space."""

    lead: str
    parts: tuple[str, ...]
    gaps: tuple[str, ...]

    def join(self, translations: Sequence[str], complete: bool = True) -> str:
        """The translations of all parts, or of the first ones, the last of which may go on."""
        pieces = [self.lead]
        for index, translation in enumerate(translations):
            pieces.append(translation)
            if complete or index + 1 < len(translations):
                pieces.append(self.gaps[index] or self._missing_space(index, translations))
        return "".join(pieces)

    def _missing_space(self, index: int, translations: Sequence[str]) -> str:
        """Chinese has no space behind a full stop; its English translation needs one."""
        if index + 1 >= len(translations) or self.parts[index][-1] not in _CJK_END:
            return ""
        before, after = translations[index][-1:], translations[index + 1][:1]
        return " " if before and after and not (_is_wide(before) or _is_wide(after)) else ""


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in _WIDE


def split(text: str, tokenizer: Tokenizer, limit: int) -> tuple[Layout, list[list[int]]]:
    """The parts of a text, and each part's ids. A part is longer than `limit` tokens only where a single
    character is."""
    sentences = list(sentence_spans(text))
    encoded = tokenizer.encode_batch([text[begin:end] for begin, end in sentences])
    spans: list[tuple[int, int]] = []
    ids: list[list[int]] = []
    for (begin, end), sentence_ids in zip(sentences, encoded, strict=True):
        for span, part_ids in _fit(text, begin, end, sentence_ids, tokenizer, limit):
            spans.append(span)
            ids.append(part_ids)
    if not spans:
        return Layout(text, (), ()), ids
    follow = [begin for begin, _ in spans[1:]] + [len(text)]
    return Layout(
        lead=text[: spans[0][0]],
        parts=tuple(text[begin:end] for begin, end in spans),
        gaps=tuple(text[end:next_begin] for (_, end), next_begin in zip(spans, follow, strict=True)),
    ), ids


def _fit(
    text: str, begin: int, end: int, ids: list[int], tokenizer: Tokenizer, limit: int
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """One sentence, cut again where it is too long."""
    if len(ids) <= limit or end - begin == 1:
        yield (begin, end), ids
        return
    pieces = max(2, min(end - begin, int(_HEADROOM * len(ids) / limit) + 1))
    spans = list(_cut(text, begin, end, max(1, (end - begin) // pieces)))
    encoded = tokenizer.encode_batch([text[b:e] for b, e in spans])
    for (piece_begin, piece_end), piece_ids in zip(spans, encoded, strict=True):
        yield from _fit(text, piece_begin, piece_end, piece_ids, tokenizer, limit)


def _cut(text: str, begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """Spans of at most `width` characters, each ended at the best place in its second half."""
    while end - begin > width:
        cut = _best_cut(text, begin + max(1, width // 2), begin + width)
        stop, following = cut, cut
        while stop > begin + 1 and text[stop - 1].isspace():
            stop -= 1
        while following < end and text[following].isspace():
            following += 1
        yield begin, stop
        begin = following
    if begin < end:
        yield begin, end


def _best_cut(text: str, earliest: int, latest: int) -> int:
    """Behind clause punctuation, else before a space, else between two characters that are drawn apart."""
    for pattern, at_end in ((_CLAUSE_END, True), (_SPACE, False)):
        matches = list(pattern.finditer(text, earliest, latest))
        if matches:
            return matches[-1].end() if at_end else matches[-1].start()
    cut = latest
    while cut > earliest and _continues(text[cut : cut + 1], text[cut - 1]):
        cut -= 1
    return cut


def _continues(character: str, previous: str) -> bool:
    joiner = "\u200d"
    return bool(character) and (
        unicodedata.combining(character) != 0
        or character == joiner
        or previous == joiner
        or "\ufe00" <= character <= "\ufe0f"
    )
