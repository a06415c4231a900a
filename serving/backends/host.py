"""The memory of the host as a device: where the CPU's slots are.

Everything is done when it is asked for. An array over an address owns nothing: whoever has it sees to it that the
memory lives.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import DeviceTensor, Pitches
from beamline.serving.contract.backend import Ints

_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)
_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
# All that this process can address, for NumPy to make views of. The first page is never ours, and its address, zero,
# NumPy would take for no memory at all.
_FIRST = mmap.PAGESIZE
_ADDRESSES: Any = (ctypes.c_uint8 * ((1 << 62) - _FIRST)).from_address(_FIRST)
# For a short copy the interpreter's lock is kept: to get it back from another engine's thread would take much longer.
_SHORT = 256 << 10  # bytes
_FEW_ROWS = 16
_libc = ctypes.PyDLL(None)
_copy_short, _fill_short = _libc.memmove, _libc.memset
_copy_short.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_fill_short.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_copy_short.restype = _fill_short.restype = None


class HostMemory:
    part: int | None = 4 << 20  # a few milliseconds

    def __init__(self) -> None:
        self._allocated: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> int:
        """Pages of its own, which the operating system gives, zeroed, when they are touched."""
        pages = mmap.mmap(-1, nbytes)
        if _NO_HUGE_PAGES is not None:
            # A slot's first entries lie far apart, head by head: to zero two megabytes around each is a long pause.
            pages.madvise(_NO_HUGE_PAGES)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(pages))
        self._allocated[address] = pages
        return address

    def free(self, address: int) -> None:
        del self._allocated[address]

    def populate(self, address: int, start: int, nbytes: int) -> int:
        pages = self._allocated[address]
        nbytes = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, len(pages) - start)
        if nbytes <= 0:
            return 0
        with suppress(OSError):  # on an older kernel whoever touches them first waits for them, as always
            pages.madvise(_POPULATE_WRITE, start, nbytes)
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @staticmethod
    def view(tensor: DeviceTensor) -> NDArray[Any]:
        return np.ndarray(tensor.shape, tensor.dtype, _ADDRESSES, tensor.address - _FIRST)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        np.ndarray(array.shape, array.dtype, _ADDRESSES, address - _FIRST)[...] = array

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        if rows * nbytes <= _SHORT and rows <= _FEW_ROWS:
            for row in range(rows):
                _copy_short(target + row * pitches[0], source + row * pitches[1], nbytes)
        elif rows == 1:
            ctypes.memmove(target, source, nbytes)
        else:
            _bytes(target, nbytes, rows, pitches[0])[...] = _bytes(source, nbytes, rows, pitches[1])

    def relayout(
        self,
        address: int,
        slots: int,
        rows: int,
        nbytes: int,
        old: Pitches,
        new: Pitches,
        clear: Callable[[int | None], None] | None,
    ) -> None:
        # The old and the new places overlap: in this order, no slot is written to before it was read. Nor is any row of
        # a slot: NumPy reads what is about to be overwritten first.
        for slot in reversed(range(slots)) if new.slot > old.slot else range(slots):
            target = _bytes(address + slot * new.slot, nbytes, rows, new.row)
            target[...] = _bytes(address + slot * old.slot, nbytes, rows, old.row)
            if clear is not None:
                clear(slot)

    def gather(self, target: int, source: int, index: Ints, entry: int, rows: int, pitches: tuple[int, int]) -> None:
        item = np.dtype((np.void, entry))
        entries = np.ndarray((rows, pitches[1] // entry), item, _ADDRESSES, source - _FIRST, (pitches[1], entry))
        taken = entries.take(index, axis=1)
        np.ndarray(taken.shape, item, _ADDRESSES, target - _FIRST, (pitches[0], entry))[...] = taken

    def zero(self, address: int, nbytes: int, rows: int = 1, pitch: int = 0) -> None:
        if rows == 1:
            fill = _fill_short if nbytes <= _SHORT else ctypes.memset
            fill(address, 0, nbytes)
        else:
            _bytes(address, nbytes, rows, pitch).fill(0)


def _bytes(address: int, nbytes: int, rows: int, pitch: int) -> NDArray[np.uint8]:
    return np.ndarray((rows, nbytes), np.uint8, _ADDRESSES, address - _FIRST, (pitch, 1))


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Some microseconds, when NumPy is asked for it."""
    return str(dtype)


def tensor_of(array: NDArray[Any]) -> DeviceTensor:
    """Where an array is; it must be kept alive."""
    return DeviceTensor(array.__array_interface__["data"][0], _name_of(array.dtype), array.shape)
