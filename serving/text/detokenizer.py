"""Text as it comes: whole characters only, and nothing from a stop string on.

A token may hold half a character, and a stop string may lie across several tokens; so both hold back what is not
certain yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamline.serving.text.model_card import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character


class Detokenizer:
    """Tokens to text, a few at a time. Text depends on what stands before (a space, half a character), so a window of
    tokens that have been streamed already is decoded with the new ones, and only the difference is new."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._prefix_offset = 0  # the window begins here
        self._read_offset = len(self._ids)  # tokens before this place are text already

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._difference(final=False)

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return self._difference(final=True)

    def _difference(self, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._prefix_offset : self._read_offset])
        text = self._tokenizer.decode(self._ids[self._prefix_offset :])
        if final:  # what is half a character now stays one
            return text[len(known) :].rstrip(_INCOMPLETE)
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        return text[len(known) :]


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
