"""The KV cache of prompts while they are prefilled, before they have a slot.

Where the host copies (`Device.part`), it grows with the prompts, a part at a time, so that those who decode meanwhile
never wait for long; and attention reads all that there is room for. Elsewhere it is as large as it will ever need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from beamline.serving.backends.arena import Arena, Sizes
from beamline.serving.backends.device import Device, DeviceTensor, TensorSpec

# So many entries at first, and twice as many when they are needed.
_FIRST_ENTRIES = 256


def by_parts(copies: Iterable[int], part: int | None) -> Iterator[None]:
    """Stops whenever a part is full; each copy says how many bytes it was."""
    copied = 0
    for nbytes in copies:
        copied += nbytes
        if part is not None and copied >= part:
            yield
            copied = 0


def populate_part(arenas: Iterable[Arena], sizes: Sizes, part: int) -> int:
    """Takes a part of the memory that steps of these sizes will use from the operating system; how many bytes."""
    left = part
    for arena in arenas:
        left -= arena.populate(sizes, left)
    return part - left


class Prefix(NamedTuple):
    """What is known already of a prompt: the first entries of a row."""

    tensors: Mapping[str, DeviceTensor]
    row: int
    length: int
    owner: object  # of the tensors' memory


class PrefillCache:
    """The entries of prompts that are prefilled together, a row each."""

    def __init__(self, caches: Sequence[TensorSpec], device: Device, known: Sequence[Prefix | None], most: int) -> None:
        """`most`: how many entries there can be."""
        self._caches = caches
        self._device = device
        self._rows = len(known)
        self._most = max(1, most)  # also for a prompt of which nothing is to be known before its last token
        self._entries = 0
        self._arenas: Sequence[Arena] = ()
        self.tensors: Mapping[str, DeviceTensor] = {}
        self._growth: Iterator[None] | None = None
        self._known = [(row, prefix) for row, prefix in enumerate(known) if prefix is not None and prefix.length]
        if device.part is None:
            self.grow(self._most)
        elif not self._known:
            self._settle(self._make(self._size(0)))

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def entries(self) -> int:
        return self._entries

    @property
    def owner(self) -> object:
        """Of the memory where the tensors are now."""
        return self._arenas

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

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

    def _make(self, entries: int) -> list[Arena]:
        sizes = {"C": entries}
        return [Arena(spec, self._rows, sizes, self._device, masked=True) for spec in self._caches]

    def _settle(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas
        self.tensors = {arena.spec.name: arena.tensor(self._rows) for arena in arenas}
        self._entries = arenas[0].layout.length

    def _growing(self, entries: int) -> Iterator[None]:
        """What is there, or known from elsewhere, is copied to larger arenas, once their memory is there."""
        arenas, part = self._make(entries), self._device.part
        while part is not None and populate_part(arenas, {"B": self._rows, "C": entries}, part) >= part:
            yield
        yield from by_parts(self._copies(arenas), part)
        self._known = []
        self._settle(arenas)

    def _copies(self, arenas: Sequence[Arena]) -> Iterator[int]:
        for row, prefix in self._known or self._present():
            for arena in arenas:
                yield arena.take(row, prefix.tensors[arena.spec.name], prefix.row, prefix.length)

    def _present(self) -> list[tuple[int, Prefix]]:
        rows = range(self._rows) if self._entries else ()
        return [(row, Prefix(self.tensors, row, self._entries, self._arenas)) for row in rows]
