"""Text as it comes: whole characters only, and nothing from a stop string on.

A token may hold half a character, and a stop string may lie across several tokens; so both hold back what is not
certain yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamline.serving.text.model_card import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character
_BYTES_OF_HALF = 3  # at most, and so tokens: the fourth finishes it
_MOST_HELD = 16  # tokens


class Detokenizer:
    """Tokens to text, a few at a time. Text depends on what stands before (a space, half a character), so a window of
    tokens that have been streamed already is decoded with the new ones, and only the difference is new. Tokens that
    yield no text are held in it, but not for ever: each push would decode all of them again."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._prefix_offset = 0  # the window begins here
        self._read_offset = len(self._ids)  # tokens before this place are text already
        self._begun = True  # the last of them may have begun a character, of which nothing was shown
        self._unshown = 0  # characters at their end that were not shown, because they may be half of one

    def push(self, token: int) -> str:
        self._ids.append(token)
        known, text = self._known(), self._text()
        begin = self._begin(known, text)
        if len(text) > begin and not text.endswith(_INCOMPLETE):
            self._move(0)
            return text[begin:]
        return self._let_go(text[begin:]) if len(self._ids) - self._read_offset > _MOST_HELD else ""

    def flush(self) -> str:
        """What is left when no more tokens come: what is half a character now stays one."""
        text = self._text()
        return text[self._begin(self._known(), text) :].rstrip(_INCOMPLETE)

    def _known(self) -> str:
        return self._tokenizer.decode(self._ids[self._prefix_offset : self._read_offset])

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids[self._prefix_offset :])

    def _begin(self, known: str, text: str) -> int:
        """Where new text begins."""
        if not self._begun:
            return len(known) - self._unshown
        place = len(known.rstrip(_INCOMPLETE))
        while place < len(known) and text[place : place + 1] == _INCOMPLETE:  # it was not finished, or is meant
            place += 1
        return place

    def _move(self, unshown: int) -> None:
        self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        self._begun, self._unshown = False, unshown

    def _let_go(self, new: str) -> str:
        """So many tokens without whole characters: what can't become one any more is shown as it is."""
        recent = self._tokenizer.decode(self._ids[-_BYTES_OF_HALF:])
        unshown = min(_incomplete(new), _incomplete(recent))
        if self._tokenizer.decode(self._ids[self._read_offset :]):
            self._move(unshown)
        else:  # they leave no trace; the text before them decides on the next one's space
            del self._ids[self._read_offset : -_BYTES_OF_HALF]
            self._unshown = 0
            if new:
                self._read_offset = len(self._ids)
                self._begun = False
        return new[: len(new) - unshown]


def _incomplete(text: str) -> int:
    return len(text) - len(text.rstrip(_INCOMPLETE))


class StopStrings:
    """Lets text through up to the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = self._beginning_at_the_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning_at_the_end(self, text: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
