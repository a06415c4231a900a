"""Flat host buffers, viewed at the current shape.

Attention reads the whole cache axis, so its length must follow what is alive, not the limit. A buffer is
reserved once for the largest shape; at a smaller one the rows lie closer together in it. Memory that was never
touched costs nothing: the pages are the operating system's until they are written.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Shape
from beamline.serving.contract.manifest import StateKind, StateTensor

_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


def sizes(tensor: StateTensor, rows: int, shape: Shape) -> tuple[int, ...]:
    axes = {"B": rows, "K": shape.beams, "C": shape.cache, "S": shape.source}
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)


class Arena:
    """One state tensor of all slots."""

    def __init__(self, tensor: StateTensor, slots: int, largest: Shape, fill: float = 0) -> None:
        self.tensor = tensor
        self.slots = slots
        self.largest = largest
        self.fill = fill
        dtype = np.dtype(tensor.dtype)
        count = math.prod(sizes(tensor, slots, largest))
        self._pages = mmap.mmap(-1, max(1, count) * dtype.itemsize)
        if _NO_HUGE_PAGES is not None:
            # A row's first entries lie far apart, head by head: to zero two megabytes around each is a long pause.
            self._pages.madvise(_NO_HUGE_PAGES)
        self._touched = 0  # bytes from the beginning that the operating system was asked for beforehand
        self.flat: NDArray[Any] = np.frombuffer(self._pages, dtype, count)
        self.view = self._at(largest)  # [slots, ...]

    def _at(self, shape: Shape) -> NDArray[Any]:
        dimensions = sizes(self.tensor, self.slots, shape)
        return self.flat[: math.prod(dimensions)].reshape(dimensions)

    @property
    def address(self) -> int:
        return int(self.flat.ctypes.data)

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)

    def resize(self, shape: Shape, rows: int) -> bool:
        """Lays the first `rows` rows out for another shape; what they did not have before is filled. Not so in a cache,
        where it is masked and only has to be finite: filling gigabytes would be a pause that everybody notices."""
        new = self._at(shape)
        if new.shape == self.view.shape:
            return False
        common = tuple(slice(0, min(a, b)) for a, b in zip(self.view.shape[1:], new.shape[1:], strict=True))
        # Old and new overlap: in this order, no row is written to before it was read.
        for row in reversed(range(rows)) if new.size > self.view.size else range(rows):
            kept = self.view[row][common]
            if np.may_share_memory(kept, new[row]):
                kept = kept.copy()
            if self.tensor.kind is not StateKind.CACHE:
                new[row] = self.fill
            new[row][common] = kept
        self.view = new
        return rows > 0

    def touch(self, shape: Shape, most: int) -> int:
        """Has the operating system give the pages that steps of this shape will use, at most so many bytes now. Returns
        how many it gave."""
        wanted = math.prod(sizes(self.tensor, shape.batch, shape)) * self.flat.itemsize
        end = min(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, self._touched + most, len(self._pages))
        given = end - self._touched
        if given <= 0:
            return 0
        with suppress(OSError):  # on an older kernel whoever touches them first waits for them, as always
            self._pages.madvise(_POPULATE_WRITE, self._touched, given)
        self._touched += -(-given // mmap.PAGESIZE) * mmap.PAGESIZE
        return given

    def clear(self, slot: int) -> None:
        self.view[slot] = self.fill
