"""What a beam has said, as far as logits processors ask: which tokens followed which, extended by one token a step.

What all beams of a request begin with (a prompt, a forced prefix) is looked at once, and shared. A beam's own part is a
few dictionaries, which its first child takes over and its other children copy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_ID_BYTES = 4
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
        self.followers: Followers = _followers(self.tokens, ngram_size) if ngram_size else {}


def _followers(tokens: Sequence[int], ngram_size: int) -> Followers:
    data, length = as_bytes(tokens), _ID_BYTES * (ngram_size - 1)
    found: dict[bytes, dict[int, None]] = {}
    starts = range(0, len(data) + 1, _ID_BYTES)
    for start, token in zip(starts, tokens[ngram_size - 1 :], strict=False):
        found.setdefault(_key(data[start : start + length]), {})[token] = None
    return {gram: tuple(behind) for gram, behind in found.items()}


class History:
    """Of one beam: the beginning, and what it has said since."""

    __slots__ = ("_beginning", "_followers", "_gram_bytes", "_tail", "_tail_bytes", "counts")

    def __init__(self, beginning: Beginning, longest_phrase: int) -> None:
        """`longest_phrase`: of how many tokens `ends_with` may be asked."""
        self._beginning = beginning
        self._gram_bytes = _ID_BYTES * (beginning.ngram_size - 1)  # negative where n-grams are not wanted
        self._tail_bytes = max(self._gram_bytes, _ID_BYTES * longest_phrase)
        last = beginning.tokens[max(0, len(beginning.tokens) - self._tail_bytes // _ID_BYTES) :]
        self._tail = as_bytes(last) if self._tail_bytes > 0 else b""
        self._followers: Followers = {}
        self.counts: dict[int, int] = {}  # of the tokens behind the beginning

    def copy(self) -> History:
        other = History.__new__(History)
        other._beginning, other._gram_bytes, other._tail_bytes = self._beginning, self._gram_bytes, self._tail_bytes
        other._tail, other._followers, other.counts = self._tail, self._followers.copy(), self.counts.copy()
        return other

    def extend(self, token: int) -> None:
        gram = self._last_gram()
        if gram is not None:
            behind = self._followers.get(gram, ())
            if token not in behind:
                self._followers[gram] = (*behind, token)
        self.counts[token] = self.counts.get(token, 0) + 1
        if self._tail_bytes > 0:
            self._tail = (self._tail + token.to_bytes(_ID_BYTES, sys.byteorder))[-self._tail_bytes :]

    def repeating(self) -> Sequence[int]:
        """The tokens that would complete an n-gram that has been, some perhaps twice."""
        gram = self._last_gram()
        if gram is None:
            return ()
        return (*self._beginning.followers.get(gram, ()), *self._followers.get(gram, ()))

    def ends_with(self, phrase: bytes) -> bool:
        return self._tail.endswith(phrase)

    def _last_gram(self) -> bytes | None:
        """None where n-grams are not wanted, or fewer tokens are there."""
        if not 0 <= self._gram_bytes <= len(self._tail):
            return None
        return _key(self._tail[len(self._tail) - self._gram_bytes :])
