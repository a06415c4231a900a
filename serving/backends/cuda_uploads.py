"""Uploads from ordinary memory, which a GPU can't copy from without the host waiting."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import ALIGNMENT

if TYPE_CHECKING:
    from beamline.serving.backends.cuda import CudaDevice

_UPLOAD_BYTES = 2**20  # of each half of the pinned memory


class Uploads:
    """Pinned memory that uploads go through: the device reads one half while the other is filled."""

    def __init__(self, device: CudaDevice) -> None:
        self._gpu = weakref.ref(device)
        self._halves = [device.pinned(_UPLOAD_BYTES) for _ in range(2)]
        self._left_at: list[Any] = [None, None]  # the mark behind the last upload from each
        self._half = self._used = 0

    def parts(self, array: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(offset, pinned copy) of each part of an array."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset = 0
        while offset < len(flat):
            if self._used == _UPLOAD_BYTES:
                self._turn()
            count = min(len(flat) - offset, _UPLOAD_BYTES - self._used)
            host = self._halves[self._half][self._used : self._used + count]
            host[...] = flat[offset : offset + count]
            self._used = min(_UPLOAD_BYTES, self._used + -(-count // ALIGNMENT) * ALIGNMENT)
            yield offset, host
            offset += count

    def _turn(self) -> None:
        gpu = self._gpu()
        assert gpu is not None
        self._left_at[self._half] = gpu.mark()
        self._half, self._used = 1 - self._half, 0
        mark, self._left_at[self._half] = self._left_at[self._half], None
        if mark is not None:
            gpu.wait(mark)
