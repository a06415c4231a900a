"""What a beam has said, as far as logits processors ask.

What all beams of a request begin with (a prompt, a forced prefix) is looked at once, and shared. A beam's own part is
the bytes of its tokens, which no child has to copy for itself, and in which C finds an n-gram within a microsecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ID_BYTES = 4
_LONGEST_KEY = 64  # bytes of an n-gram that are kept as they are; of a longer one, a digest

Followers = dict[bytes, tuple[int, ...]]  # of each n-gram: what has come behind it, each token once


def as_bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _key(gram: bytes) -> bytes:
    return gram if len(gram) <= _LONGEST_KEY else blake2b(gram, digest_size=16).digest()


class Beginning:
    """What all beams of a request begin with. Looking at it takes about a millisecond for a thousand tokens."""

    def __init__(self, tokens: Sequence[int], ngram_size: int) -> None:
        self.tokens = tuple(tokens)
        self.ngram_size = ngram_size
        self._gram_bytes = ID_BYTES * (ngram_size - 1)  # negative where n-grams are not wanted
        self._followers: Followers = _followers(self.tokens, ngram_size) if ngram_size else {}

    def tail(self, longest_phrase: int) -> bytes:
        """With what a beam's own bytes begin: the last tokens, as many as an n-gram or a phrase may reach back."""
        count = max(self.ngram_size - 1, longest_phrase)
        return as_bytes(self.tokens[max(0, len(self.tokens) - count) :]) if count > 0 else b""

    def repeats(self, beams: Sequence[bytes]) -> bool:
        """Whether the next token of any of them could complete an n-gram that has been: mostly not, which is quickly
        seen. Each is what a beam has said, and all are equally long."""
        last = len(beams[0]) - self._gram_bytes
        if self._gram_bytes < 0 or last < 0:
            return False
        return bool(self._followers) or any(said.find(said[last:]) < last for said in beams)

    def repeating(self, said: bytes) -> Sequence[int]:
        """The tokens that would complete an n-gram that has been, some perhaps twice. `said` is what a beam has said,
        behind the `tail`."""
        last = len(said) - self._gram_bytes  # where the n-gram begins that the next token completes
        if self._gram_bytes < 0 or last < 0:
            return ()
        gram = said[last:]
        before = self._followers.get(_key(gram), ()) if self._followers else ()
        return before if said.find(gram) >= last else (*before, *_behind(gram, said))


def _followers(tokens: Sequence[int], ngram_size: int) -> Followers:
    data, length = as_bytes(tokens), ID_BYTES * (ngram_size - 1)
    found: dict[bytes, dict[int, None]] = {}
    starts = range(0, len(data) + 1, ID_BYTES)
    for start, token in zip(starts, tokens[ngram_size - 1 :], strict=False):
        found.setdefault(_key(data[start : start + length]), {})[token] = None
    return {gram: tuple(behind) for gram, behind in found.items()}


def _behind(gram: bytes, said: bytes) -> Sequence[int]:
    """Every token that stands behind the n-gram."""
    if not gram:
        return tuple(set(array("I", said)))
    found = set()
    start = said.find(gram)
    while 0 <= start < len(said) - len(gram):
        if start % ID_BYTES == 0:  # else the bytes of two tokens look like one
            found.add(start + len(gram))
        start = said.find(gram, start + 1)
    return [array("I", said[place : place + ID_BYTES])[0] for place in sorted(found)]
