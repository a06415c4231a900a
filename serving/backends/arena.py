"""One state tensor of all slots, such as a layer's keys in the KV cache: a flat buffer in a device's memory, viewed at
the current shape.

Attention reads the whole cache axis, so its length must follow what is alive, not the limit. A buffer is reserved once
for the largest shape; at a smaller one the slots lie closer together in it. Memory of the host that was never touched
costs nothing: the pages are the operating system's until they are written.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import (
    SCRATCH_BYTES,
    Device,
    DeviceTensor,
    Pitches,
    TensorSpec,
    aligned,
    item_bytes,
    sizes_of,
)
from beamline.serving.contract.backend import Ints
from beamline.serving.errors import ModelError

Sizes = Mapping[str, int]


class Layout:
    """How one slot lies in memory at some sizes: as `rows` pieces, each of `length` entries along the last axis that
    can change. `entry`, `piece` and `slot` are bytes."""

    def __init__(self, spec: TensorSpec, sizes: Sizes) -> None:
        self.shape = sizes_of(spec.axes[1:], sizes)
        changing = [place for place, axis in enumerate(spec.axes[1:]) if isinstance(axis, str)]
        split = changing[-1] if changing else 0
        if any(place not in (0, split) for place in changing):
            raise ModelError(f"{spec.name} has axes {spec.axes}, which can't be laid out anew")
        self.split = split
        self.rows = math.prod(self.shape[:split])
        self.length = self.shape[split] if self.shape else 1
        self.entry = math.prod(self.shape[split + 1 :]) * item_bytes(spec.dtype)
        self.piece = self.length * self.entry
        self.slot = self.rows * self.piece


class Arena:
    """Its memory is freed with it."""

    def __init__(
        self,
        spec: TensorSpec,
        slots: int,
        largest: Sizes,
        device: Device,
        fill: NDArray[Any] | None = None,
        masked: bool = False,
    ) -> None:
        """`fill`: what an empty slot holds, where that is not zeros. `masked`: nobody looks at what was not written, as
        in a cache; so it only has to be finite, and gigabytes of it need not be wiped."""
        self.spec = spec
        self.slots = slots
        self._device = device
        self._masked = masked
        self.layout = Layout(spec, largest)
        self.nbytes = aligned(max(1, slots * self.layout.slot))
        self.address = self._allocate(self.nbytes)
        self._populated = 0  # bytes from the beginning
        self._blank: int | None = None  # all slots, if they held `fill`, at the largest sizes
        if fill is not None:
            blank = np.full(slots * self.layout.slot // fill.itemsize, fill)
            self._blank = self._allocate(aligned(blank.nbytes))
            device.upload(self._blank, blank)
            self._clear(self.address, slots * self.layout.slot)

    def _allocate(self, nbytes: int) -> int:
        address = self._device.allocate(nbytes)
        weakref.finalize(self, self._device.free, address)
        return address

    @property
    def scratch_bytes(self) -> int:
        """What a GPU needs at most to lay it out anew: of what is masked, part after part."""
        return min(self.nbytes, max(SCRATCH_BYTES, self.nbytes // self.slots)) if self._masked else self.nbytes

    def tensor(self, batch: int) -> DeviceTensor:
        return DeviceTensor(self.address, self.spec.dtype, (batch, *self.layout.shape))

    def at(self, slot: int) -> int:
        return self.address + slot * self.layout.slot

    def clear(self, slot: int) -> None:
        self._clear(self.at(slot), self.layout.slot)

    def clear_last(self, slot: int, entries: int) -> None:
        """Its last entries along the axis that can change."""
        nbytes = entries * self.layout.entry
        self._clear(self.at(slot) + self.layout.piece - nbytes, nbytes, self.layout.rows)

    def _clear(self, address: int, nbytes: int, rows: int = 1) -> None:
        """Rows that are a piece apart."""
        piece = self.layout.piece
        if self._blank is None:
            self._device.zero(address, nbytes, rows, piece)
        else:
            self._device.copy(address, self._blank, nbytes, rows, (piece, piece))

    def _clear_rest(self, slot: int, rows: int, kept: int) -> None:
        """All of a slot but the first bytes of its first rows."""
        layout = self.layout
        self._clear(self.at(slot) + kept, layout.piece - kept, rows)
        self._clear(self.at(slot) + rows * layout.piece, (layout.rows - rows) * layout.piece)

    def move(self, source: int, target: int) -> None:
        self._device.copy(self.at(target), self.at(source), self.layout.slot)

    def write(self, slot: int, values: NDArray[Any]) -> None:
        """All of a slot."""
        assert values.nbytes == self.layout.slot, (self.spec, values.shape)
        self._device.upload(self.at(slot), values)

    def take(self, slot: int, source: DeviceTensor, row: int, length: int) -> int:
        """The first `length` entries of a row of another tensor, which may have more of them. Returns how many bytes
        were copied."""
        layout, shape = self.layout, source.shape[1:]
        rows = layout.rows
        theirs = (shape[layout.split] if shape else 1) * layout.entry
        if layout.split and isinstance(self.spec.axes[1], str):  # another axis that can change, before the last one
            rows = rows // layout.shape[0] * min(length, layout.shape[0], shape[0])
        begin = source.address + row * (source.nbytes // source.shape[0])
        nbytes = min(length * layout.entry, layout.piece, theirs)
        self._device.copy(self.at(slot), begin, nbytes, rows, (layout.piece, theirs))
        return rows * nbytes

    def spread(self, slot: int, source: DeviceTensor, row: int) -> None:
        """One row without a beam axis, to all beams of the slot: [B, ...] -> [K, ...]."""
        nbytes = source.nbytes // source.shape[0]
        for beam in range(self.layout.shape[0]):
            self._device.copy(self.at(slot) + beam * nbytes, source.address + row * nbytes, nbytes)

    def resize(self, sizes: Sizes, slots: int) -> bool:
        """Lays the first `slots` slots out for other sizes; what they did not have before is empty, where anybody looks
        at it. Whether there was anything to copy."""
        old, new = self.layout, Layout(self.spec, sizes)
        if old.shape == new.shape:
            return False
        self.layout = new
        rows, piece = min(old.rows, new.rows), min(old.piece, new.piece)

        def clear(slot: int | None) -> None:
            if slot is None:
                self._clear(self.address, slots * new.slot)
            else:
                self._clear_rest(slot, rows, piece)

        pitches = Pitches(old.slot, old.piece), Pitches(new.slot, new.piece)
        self._device.relayout(self.address, slots, rows, piece, *pitches, None if self._masked else clear)
        return slots > 0

    def keep(self, slot: int, entries: Ints, first: int) -> None:
        """Only these entries along the changing axis, in this order, at its beginning. Those before the first are where
        they were."""
        layout = self.layout
        if first < len(entries):
            target = self.at(slot) + first * layout.entry
            pitches = (layout.piece, layout.piece)
            self._device.gather(target, self.at(slot), entries[first:], layout.entry, layout.rows, pitches)
        if not self._masked:
            self._clear_rest(slot, layout.rows, len(entries) * layout.entry)

    def populate(self, sizes: Sizes, most: int) -> int:
        """Takes the memory that steps of these sizes will use from the operating system, at most so many bytes now.
        Returns how many it got."""
        wanted = math.prod(sizes_of(self.spec.axes, sizes)) * item_bytes(self.spec.dtype)
        given = self._device.populate(self.address, self._populated, min(wanted - self._populated, most))
        self._populated += given
        return given
