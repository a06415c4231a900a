"""Where sentences end: a few careful rules for all languages.

In doubt the text is not split. Two sentences in one part are translated nearly as well as apart, while half a
sentence is translated badly; parts that are too long for the model are cut later (`serving/text/splitting.py`).
Every step is linear in the text: it comes from strangers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from beamline.serving.text.abbreviations import BEFORE_NUMBER, DOTTED_THAT_END, NEVER_END

_LINE_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
_TERMINATORS = frozenset(".!?…‽؟۔।॥։።")
_CLOSERS = frozenset("\"'”’»)]}›」』）】》")
_OPENERS = frozenset("\"'“‘„‚«([{‹「『（【《¿¡-–—")
_CLOSING_QUOTES = frozenset("\"'”’」』》")

# Either white space, before which a sentence may end, or a full stop of the scripts that put none behind it.
_BREAK = re.compile(r"\s+|[。！？｡]+[\"'”’」』）】》)\]]*")
_DOTTED = re.compile(r"(?:\w{1,2}\.)+\w{1,2}")
_LONGEST_ABBREVIATION = 24


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of every sentence, in order. Between them there is only white space, or nothing."""
    begin = len(text) - len(text.lstrip())
    for match in _BREAK.finditer(text, begin):
        if not match.group()[0].isspace():
            if _ends_cjk(text, match.end()):
                yield begin, match.end()
                begin = match.end()
        elif match.start() == begin:
            begin = match.end()
        elif _ends(text, begin, match.start(), match.end()):
            yield begin, match.start()
            begin = match.end()
    if begin < len(text):
        yield begin, len(text)


def _ends_cjk(text: str, stop: int) -> bool:
    """「はい。」と言った is one sentence: behind a quotation it may go on."""
    following = text[stop : stop + 1]
    return text[stop - 1] not in _CLOSING_QUOTES or not following.isalnum()


def _ends(text: str, begin: int, stop: int, after: int) -> bool:
    """Whether the sentence from `begin` ends at `stop`, where white space up to `after` follows."""
    if after == len(text) or not _LINE_BREAKS.isdisjoint(text[stop:after]):
        return True
    close = stop
    while close > begin and text[close - 1] in _CLOSERS:
        close -= 1
    mark = close
    while mark > begin and text[mark - 1] in _TERMINATORS:
        mark -= 1
    if mark == close:
        return False
    following = _first_letter(text, after)
    if following.islower():
        return False
    if text[mark:close] != "." or mark == begin:
        return True
    if text[mark - 1].isspace():
        return True  # a full stop that stands alone abbreviates nothing
    word = text[max(begin, mark - _LONGEST_ABBREVIATION) : mark].split()[-1]
    return not _is_abbreviation(word.lstrip("".join(_OPENERS)), following)


def _first_letter(text: str, position: int) -> str:
    while position < len(text) and text[position] in _OPENERS:
        position += 1
    return text[position : position + 1]


def _is_abbreviation(word: str, following: str) -> bool:
    """`following` is the next sentence's first character, if this is one; it is no small letter."""
    if len(word) == 1 and word.isalpha():
        return word.lower() != word.upper()  # an initial; scripts without case have none
    if word.isdecimal():
        return len(word) <= 2  # an ordinal: "am 3. Oktober", "1. Introduction"
    if _DOTTED.fullmatch(word):
        return word.lower() not in DOTTED_THAT_END
    if word.lower() in BEFORE_NUMBER and following.isdecimal():
        return True
    return word.lower() in NEVER_END
