"""A GPU's memory and stream over host memory.

Work is done only when somebody waits for it, so that code that forgets to wait reads stale values. What CUDA would not
forgive is refused: copies outside an allocation, or over each other, and pageable memory while recording.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import ALIGNMENT, MemoryUse, Pitches, item_bytes
from beamline.serving.contract.backend import Ints
from beamline.serving.errors import OutOfMemory


class Refused(Exception):
    """A GPU would have crashed, or worse, gone on."""


class EmulatedDevice:
    part: int | None = None

    def __init__(self) -> None:
        self.number = self.stream = 0
        self.most_bytes: int | None = None  # that may be allocated
        self._in_use = 0  # bytes: what is freed may be allocated again at once, as in a pool, though not by the host
        self.waits = self.copies = self.copied_bytes = 0
        self.recorded = 0
        self.replayed = 0
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._pinned: list[NDArray[np.uint8]] = []
        self._queue: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None
        self._marks = self._done = 0  # marks that were made, and that were reached
        self._reached: dict[int, float] = {}  # when, of those that are timed
        self.clock: Callable[[], float] = time.perf_counter  # the device's own

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        if self.most_bytes is not None and self._in_use + nbytes > self.most_bytes:
            left = self.most_bytes - self._in_use
            raise OutOfMemory(f"the emulator has {left:,} bytes left, and {nbytes:,} more are needed")
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        buffer = raw[offset : offset + nbytes]
        address = int(buffer.ctypes.data)
        self._buffers[address] = buffer
        self._in_use += nbytes
        return address

    def free(self, address: int) -> None:
        if address in self._buffers:
            self._in_use -= len(self._buffers[address])
            self._ask(lambda: self._buffers.pop(address, None))

    def enter(self) -> None:
        pass

    def reserve(self, scratch: int, index: int) -> None:
        pass

    def populate(self, address: int, start: int, nbytes: int) -> int:
        return 0

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        array = np.full(nbytes, 0xA5, np.uint8)  # whoever reads before it is written sees garbage
        self._pinned.append(array)
        return array

    def bytes_at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        for start, buffer in self._buffers.items():
            if start <= address and address + nbytes <= start + len(buffer):
                return buffer[address - start : address - start + nbytes]
        raise Refused(f"{nbytes} bytes at {address} are in no allocation")

    def view(self, address: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """For a test that looks into memory. Does all work first."""
        self.finish()
        return self.bytes_at(address, math.prod(shape) * item_bytes(dtype)).view(dtype).reshape(shape)

    @property
    def allocated_bytes(self) -> int:
        self.finish()
        return sum(len(buffer) for buffer in self._buffers.values())

    # -- work, in order ----------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[], Any]) -> None:
        (self._queue if self._recording is None else self._recording).append(work)

    def finish(self) -> None:
        """All that was asked for."""
        while self._queue:
            self._queue.pop(0)()

    def trim(self) -> None:
        self.finish()

    def drain(self) -> bool:
        self.finish()
        return True

    def upload(self, address: int, array: NDArray[Any]) -> None:
        if not array.flags.c_contiguous:
            raise Refused("an array with gaps can't be copied in one piece")
        if any(np.shares_memory(array, pinned) for pinned in self._pinned):
            data = array
        elif self._recording is not None:
            raise Refused("pageable memory can't be copied while recording")
        else:
            data = array.copy()
        flat = data.reshape(-1).view(np.uint8)

        def copy() -> None:
            self.bytes_at(address, flat.nbytes)[...] = flat

        self._ask(copy)

    def download(self, array: NDArray[Any], address: int) -> None:
        flat = array.reshape(-1).view(np.uint8)

        def copy() -> None:
            flat[...] = self.bytes_at(address, flat.nbytes)

        self._ask(copy)

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        if rows > 1 and min(pitches) < nbytes:
            raise Refused(f"rows of {nbytes} bytes lie {pitches} apart")

        def copy() -> None:
            for row in range(rows):
                into = self.bytes_at(target + row * pitches[0], nbytes)
                from_ = self.bytes_at(source + row * pitches[1], nbytes)
                if nbytes and np.shares_memory(into, from_):
                    raise Refused("the places of a copy overlap")
                into[...] = from_

        self._ask(copy)

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
        kept: dict[tuple[int, int], NDArray[np.uint8]] = {}

        def read() -> None:
            for slot, row in itertools.product(range(slots), range(rows)):
                kept[slot, row] = self.bytes_at(address + slot * old.slot + row * old.row, nbytes).copy()

        def write() -> None:
            for (slot, row), values in kept.items():
                self.bytes_at(address + slot * new.slot + row * new.row, nbytes)[...] = values

        self._ask(read)
        if clear is not None:
            clear(None)
        self._ask(write)

    def gather(self, target: int, source: int, index: Ints, entry: int, rows: int, pitches: tuple[int, int]) -> None:
        wanted: list[int] = index.tolist()  # as it is now

        def copy() -> None:
            kept = {
                (row, place): self.bytes_at(source + row * pitches[1] + each * entry, entry).copy()
                for row in range(rows)
                for place, each in enumerate(wanted)
            }
            for (row, place), values in kept.items():
                self.bytes_at(target + row * pitches[0] + place * entry, entry)[...] = values

        self._ask(copy)

    def zero(self, address: int, nbytes: int, rows: int = 1, pitch: int = 0) -> None:
        if rows > 1 and pitch < nbytes:
            raise Refused(f"rows of {nbytes} bytes lie {pitch} apart")

        def work() -> None:
            for row in range(rows):
                self.bytes_at(address + row * pitch, nbytes)[...] = 0

        self._ask(work)

    def launch(self, work: Callable[[], None]) -> None:
        """What a context enqueues."""
        self._ask(work)

    @property
    def recording(self) -> bool:
        return self._recording is not None

    def mark(self, timed: bool = False) -> int:
        self._marks += 1
        number = self._marks

        def reached() -> None:
            self._done = number
            if timed:
                self._reached[number] = self.clock()

        self._ask(reached)
        return number

    def wait(self, mark: int) -> None:
        if self._recording is not None:
            raise Refused("the host can't wait while recording")
        self.waits += 1
        while self._done < mark:
            self._queue.pop(0)()

    def forget(self, mark: int) -> None:
        self._reached.pop(mark, None)

    def seconds(self, begin: int, end: int) -> float:
        return self._reached.pop(end) - self._reached.pop(begin)

    def memory(self) -> MemoryUse:
        used = sum(len(buffer) for buffer in self._buffers.values())
        return MemoryUse(used, used, 2**40 - used, 2**40)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.begin_recording()
        try:
            work()
        finally:
            recording = self.end_recording()
        return lambda: self.replay(recording)

    def begin_recording(self) -> None:
        self._recording = []

    def end_recording(self) -> list[Callable[[], None]]:
        recording, self._recording = self._recording, None
        assert recording is not None
        self.recorded += 1
        return recording

    def replay(self, recording: list[Callable[[], None]]) -> None:
        self.replayed += 1
        self._queue.extend(recording)
