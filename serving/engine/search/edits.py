"""Edits of a step's scores as arrays: for each beam a list of (token, scale, add), no token twice.

A list grows with its beam, by one token a step; what the beam began with (a long prompt's tokens, say) is never gone
through again, only copied as it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from beamline.serving.contract.backend import Floats, Ints

FORBIDDEN = float("-inf")
# A list is padded to one of these, or to twice and four times the last and so on, so that few shapes occur.
_SIZES = (0, 4, 16, 64, 256, 1024, 2048, 4096)


class EditList:
    """What is edited for one beam: in arrays that are longer than the list is."""

    __slots__ = ("_add", "_added", "_index", "_known", "_scale", "size")

    def __init__(self, tokens: Iterable[int] = (), scale: float = 1.0) -> None:
        """It begins with these tokens, all scaled alike."""
        # Where each token stands: of those that it began with, which copies share, and of those that came since.
        self._known = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        self._added: dict[int, int] = {}
        self.size = size = len(self._known)
        self._index: Ints = np.fromiter(self._known, np.int64, size)
        self._scale: Floats = np.full(size, scale, np.float32)
        self._add: Floats = np.zeros(size, np.float32)

    def copy(self) -> EditList:
        other = EditList.__new__(EditList)
        other.size, other._known, other._added = self.size, self._known, self._added.copy()
        other._index, other._scale, other._add = self._index.copy(), self._scale.copy(), self._add.copy()
        return other

    def put(self, token: int, scale: float, add: float) -> None:
        place = self._place(token)
        if place is None:
            place = self._added[token] = self.size
            if place == len(self._index):
                self._lengthen()
            self.size += 1
        self._index[place], self._scale[place], self._add[place] = token, scale, add

    def _lengthen(self) -> None:
        more = max(64, self.size)
        self._index = np.concatenate([self._index, np.zeros(more, np.int64)])
        self._scale = np.concatenate([self._scale, np.ones(more, np.float32)])
        self._add = np.concatenate([self._add, np.zeros(more, np.float32)])

    def _place(self, token: int) -> int | None:
        place = self._known.get(token)
        return self._added.get(token) if place is None else place

    def write(self, forbidden: Sequence[int], index: Ints, scale: Floats, add: Floats) -> None:
        """Into rows [E] that hold it, with these tokens forbidden besides. The rest of a row is padded with an edit of
        its own, because writing one token twice is only safe where both write the same."""
        size = self.size
        index[:size], scale[:size], add[:size] = self._index[:size], self._scale[:size], self._add[:size]
        for token in forbidden:
            place = self._place(token)
            if place is None:
                place, size = size, size + 1
                index[place] = token
            scale[place], add[place] = 1.0, FORBIDDEN
        index[size:], scale[size:], add[size:] = index[0], scale[0], add[0]


@dataclass(frozen=True, slots=True)
class BeamEdits:
    """A beam's list, and what is forbidden in this step only, each token once."""

    edits: EditList
    forbidden: Sequence[int] = ()

    @property
    def longest(self) -> int:
        return self.edits.size + len(self.forbidden)


class EditArrays:
    """A step's edits as index, scale, add [B, K, E], in memory that is used again: valid until the next step's."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._arrays = _arrays((0, 0, 0))

    def release(self) -> None:
        """What long lists took."""
        self._arrays = _arrays((0, 0, 0))

    def write(self, rows: Sequence[Sequence[BeamEdits]], beams: int) -> tuple[Ints, Floats, Floats]:
        """Edits of B requests, each per beam."""
        size = _padded(max((each.longest for row in rows for each in row), default=0), self._vocabulary)
        if (shape := (len(rows), beams, size)) != self._arrays[0].shape:
            self._arrays = _arrays(shape)
        index, scale, add = self._arrays
        for number, row in enumerate(rows if size else ()):
            edited = [(beam, each) for beam, each in enumerate(row) if each.longest]
            if len(edited) < beams:
                index[number], scale[number], add[number] = 0, 1, 0
            for beam, each in edited:
                each.edits.write(each.forbidden, index[number, beam], scale[number, beam], add[number, beam])
        return index, scale, add


def _arrays(shape: tuple[int, int, int]) -> tuple[Ints, Floats, Floats]:
    return np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.float32)


def _padded(longest: int, vocabulary: int) -> int:
    """Beyond the usual sizes, never more than there are words: a plan of TensorRT's ends there."""
    usual = next((size for size in _SIZES if size >= longest), None)
    if usual is not None:
        return usual
    size = _SIZES[-1]
    while size < longest:
        size *= 2
    return min(size, max(longest, vocabulary))
