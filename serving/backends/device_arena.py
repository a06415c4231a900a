"""One state tensor of all slots in device memory: a flat buffer that is viewed at the current shape.

As `arena.py` on the host, but everything is a copy that the device does when its turn comes. A tensor is seen as
`rows` pieces of `piece` bytes per slot: the pieces begin with the last axis that can change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import Device, DeviceTensor, TensorSpec, aligned, item_bytes, sizes_of
from beamline.serving.errors import ModelError

Sizes = Mapping[str, int]


class Layout:
    """How one slot lies in memory at some sizes."""

    def __init__(self, spec: TensorSpec, sizes: Sizes) -> None:
        self.shape = sizes_of(spec.axes[1:], sizes)
        item = item_bytes(spec.dtype)
        changing = [place for place, axis in enumerate(spec.axes[1:]) if isinstance(axis, str)]
        split = changing[-1] if changing else 0
        if any(place not in (0, split) for place in changing):
            raise ModelError(f"{spec.name} has axes {spec.axes}, which can't be laid out anew")
        self.rows = math.prod(self.shape[:split])
        self.entry = math.prod(self.shape[split + 1 :]) * item  # bytes of one step along the last changing axis
        self.length = self.shape[split] if self.shape else 1
        self.piece = self.length * self.entry if self.shape else item
        self.slot = self.rows * self.piece


class DeviceArena:
    def __init__(
        self, spec: TensorSpec, slots: int, largest: Sizes, device: Device, fill: NDArray[Any] | None = None
    ) -> None:
        self.spec = spec
        self.slots = slots
        self._device = device
        self.layout = Layout(spec, largest)
        self.nbytes = aligned(max(1, slots * self.layout.slot))
        self.address = device.allocate(self.nbytes)
        self._blank: int | None = None  # as many bytes as a slot can have, where an empty slot is not zeros
        if fill is not None:
            blank = np.full(self.layout.slot // fill.itemsize, fill)
            self._blank = device.allocate(aligned(blank.nbytes))
            device.upload(self._blank, blank)
            for slot in range(slots):
                self.clear(slot)

    def tensor(self, batch: int) -> DeviceTensor:
        return DeviceTensor(self.address, self.spec.dtype, (batch, *self.layout.shape))

    def at(self, slot: int) -> int:
        return self.address + slot * self.layout.slot

    def clear(self, slot: int) -> None:
        if self._blank is None:
            self._device.zero(self.at(slot), self.layout.slot)
        else:
            self._device.copy(self.at(slot), self._blank, self.layout.slot)

    def move(self, source: int, target: int) -> None:
        self._device.copy(self.at(target), self.at(source), self.layout.slot)

    def write(self, slot: int, values: NDArray[Any]) -> None:
        """All of a slot."""
        assert values.nbytes == self.layout.slot, (self.spec, values.shape)
        self._device.upload(self.at(slot), values)

    def take(self, slot: int, source: DeviceTensor, row: int, length: int) -> None:
        """The first `length` steps along the changing axis, from a tensor that may be longer there."""
        layout = self.layout
        theirs = source.nbytes // source.shape[0] // max(1, layout.rows)
        self._device.copy(
            self.at(slot),
            source.address + row * theirs * layout.rows,
            min(length * layout.entry, layout.piece, theirs),
            layout.rows,
            (layout.piece, theirs),
        )

    def spread(self, slot: int, source: DeviceTensor, row: int) -> None:
        """One row without a beam axis, to all beams of the slot: [B, ...] -> [K, ...]."""
        nbytes = source.nbytes // source.shape[0]
        for beam in range(self.layout.shape[0]):
            self._device.copy(self.at(slot) + beam * nbytes, source.address + row * nbytes, nbytes)

    def resize(self, sizes: Sizes, slots: int, scratch: int) -> bool:
        """Lays the first `slots` slots out for other sizes; what they did not have before is empty."""
        old, new = self.layout, Layout(self.spec, sizes)
        if old.shape == new.shape:
            return False
        self.layout = new
        rows, piece = min(old.rows, new.rows), min(old.piece, new.piece)
        # Through other memory: the old and the new places overlap.
        for slot in range(slots):
            kept = scratch + slot * rows * piece
            self._device.copy(kept, self.address + slot * old.slot, piece, rows, (piece, old.piece))
        for slot in range(slots):
            self.clear(slot)
            kept = scratch + slot * rows * piece
            self._device.copy(self.at(slot), kept, piece, rows, (new.piece, piece))
        return slots > 0

    def keep(self, slot: int, entries: Sequence[int], scratch: int, clear_rest: bool) -> None:
        """Only these entries along the changing axis, in this (ascending) order, at its beginning."""
        layout = self.layout
        self._device.copy(scratch, self.at(slot), layout.slot)
        if clear_rest:
            self.clear(slot)
        for begin, first, count in _runs(entries):
            if begin == first and not clear_rest:
                continue  # it stays where it is
            target, source = self.at(slot) + begin * layout.entry, scratch + first * layout.entry
            pitches = (layout.piece, layout.piece)
            self._device.copy(target, source, count * layout.entry, layout.rows, pitches)


def _runs(entries: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours stay neighbours: (where to, where from, how many)."""
    if not entries:
        return []
    starts = [0, *(place for place, (a, b) in enumerate(pairwise(entries), 1) if b != a + 1), len(entries)]
    return [(begin, entries[begin], end - begin) for begin, end in pairwise(starts)]
