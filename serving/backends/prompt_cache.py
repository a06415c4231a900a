"""Where prompts are taken in: host memory that grows with them, a part at a time, so that nobody who decodes meanwhile
has to wait for long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from beamline.serving.backends.arena import Arena
from beamline.serving.contract.backend import Shape
from beamline.serving.contract.manifest import StateTensor

# Bytes that are copied, or asked of the operating system, between two steps: a few milliseconds.
_PART = 4 << 20
# So many entries at first, and twice as many when they are needed: attention reads all that there is room for.
_FIRST_ENTRIES = 256


def by_parts(copies: Iterable[int]) -> Iterator[None]:
    """Stops whenever a part is full; each copy says how many bytes it was."""
    copied = 0
    for nbytes in copies:
        copied += nbytes
        if copied >= _PART:
            yield
            copied = 0


def touch_a_part(arenas: Iterable[Arena], shape: Shape) -> int:
    """Has the operating system give a part of what steps of this shape will use; returns how many bytes."""
    left = _PART
    for arena in arenas:
        left -= arena.touch(shape, left)
    return _PART - left


class Prefix(NamedTuple):
    """What is known already of a prompt: the first entries of a row."""

    tensors: Mapping[str, NDArray[Any]]
    row: int
    length: int


class PromptRoom:
    """The cache entries of prompts that are taken in together, a row each."""

    def __init__(self, caches: Sequence[StateTensor], known: Sequence[Prefix | None], most: int) -> None:
        """`most`: how many entries the longest of them will have."""
        self._caches = caches
        self._rows = len(known)
        self._most = most
        self._entries = 0
        self.tensors: Mapping[str, NDArray[Any]] = {}
        self._growth: Iterator[None] | None = None
        self._known = [(row, prefix) for row, prefix in enumerate(known) if prefix is not None and prefix.length]
        if not self._known:
            self._settle(self._arenas(self._size(0)))

    def grow(self, needed: int) -> bool:
        """Whether there is room for so many entries, after a part of the work for it. While that goes on, nothing may
        be written."""
        if self._growth is None:
            if needed <= self._entries:
                return True
            self._growth = self._growing(self._size(needed))
        for _ in self._growth:
            return False
        self._growth = None
        return needed <= self._entries

    def _size(self, needed: int) -> int:
        needed = max([_FIRST_ENTRIES, needed, *(prefix.length for _, prefix in self._known)])
        return min(self._most, _FIRST_ENTRIES << math.ceil(math.log2(needed / _FIRST_ENTRIES)))

    def _arenas(self, entries: int) -> list[Arena]:
        return [Arena(tensor, self._rows, Shape(self._rows, 1, entries, 1)) for tensor in self._caches]

    def _settle(self, arenas: Sequence[Arena]) -> None:
        self.tensors = {arena.tensor.name: arena.view for arena in arenas}
        self._entries = arenas[0].view.shape[2]

    def _growing(self, entries: int) -> Iterator[None]:
        """What is there, or known from elsewhere, is copied to larger arenas, once their pages are there."""
        arenas = self._arenas(entries)
        while touch_a_part(arenas, arenas[0].largest) >= _PART:
            yield
        yield from by_parts(self._copies(arenas))
        self._known = []
        self._settle(arenas)

    def _copies(self, arenas: Sequence[Arena]) -> Iterator[int]:
        sources = self._known or [(row, Prefix(self.tensors, row, self._entries)) for row in range(self._rows)]
        for row, prefix in sources:
            for arena in arenas:
                entries = prefix.tensors[arena.tensor.name][prefix.row, :, : prefix.length]
                arena.view[row, :, : prefix.length] = entries
                yield entries.nbytes
