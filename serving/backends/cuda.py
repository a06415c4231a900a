"""A real GPU, through CUDA's driver API (`cuda.bindings.driver`): memory, one stream, and events.

Nothing here has been run on hardware yet; docs/gpu.md says what has been checked and how.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.cuda_graphs import GraphRecorder
from beamline.serving.backends.cuda_resources import Owned, checked
from beamline.serving.backends.cuda_uploads import Uploads
from beamline.serving.backends.device import SCRATCH_BYTES, MemoryUse, Pitches, aligned, is_lost
from beamline.serving.contract.backend import Ints
from beamline.serving.errors import ComputeError, OutOfMemory

_KERNELS = Path(__file__).parent / "kernels" / "gather.ptx"
_THREADS, _MOST_BLOCKS = 256, 1024
_NO_LIMIT = 2**64 - 1


class Mark(NamedTuple):
    event: Any
    number: int
    timed: bool


class CudaDevice:
    """Use it from one thread at a time; only `free`, which the garbage collector calls, may come from any. `waits`
    counts how often the host stood still. Its memory goes with it, so that of an unloaded model, too: each has its
    own."""

    part: int | None = None  # it copies while the host goes on

    def __init__(self, number: int) -> None:
        from cuda.bindings import driver

        self.number = number
        self.waits = 0
        self.copies = 0
        self.copied_bytes = 0
        self._cuda: Any = driver
        self._check(driver.cuInit(0))
        self._context = self._check(driver.cuDevicePrimaryCtxRetain(self._check(driver.cuDeviceGet(number))))
        self.enter()
        self._stream = self._check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        try:
            self._pool = self._make_pool()
        except BaseException:
            driver.cuStreamDestroy(self._stream)
            raise
        self._owned = Owned(driver, number, self._context, self._stream, self._pool)
        release = weakref.finalize(self, self._owned.release)
        release.atexit = False  # the driver does that itself, and may be gone by then
        self._module = self._check(driver.cuModuleLoadData(_KERNELS.read_bytes() + b"\0"))
        self._owned.module = self._module
        self._recorder = GraphRecorder(driver, number, self._stream, self._owned)
        self._marks = 0  # that were made
        self._scratch = self._scratch_bytes = 0  # where copies go between that overlap; the stream keeps their order
        self._index = self._index_bytes = 0
        self._uploads: Uploads | None = None

    def _make_pool(self) -> Any:
        """Memory of its own, which keeps what is freed until it is needed again: the usual pool gives everything back
        whenever somebody waits, and a step waits."""
        driver = self._cuda
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.number
        pool = self._check(driver.cuMemPoolCreate(properties))
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        try:
            self._check(driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(_NO_LIMIT)))
        except BaseException:
            driver.cuMemPoolDestroy(pool)
            raise
        return pool

    @property
    def stream(self) -> int:
        """Its address, for whoever runs graphs on it."""
        return int(self._stream)

    def enter(self) -> None:
        """Calls mean the calling thread's current device, which whoever runs graphs may have changed, and theirs do."""
        self._check(self._cuda.cuCtxSetCurrent(self._context))

    def _check(self, answer: tuple[Any, ...]) -> Any:
        return checked(self._cuda, self.number, answer)

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self.enter()
        self._free_unused()
        error, address = self._cuda.cuMemAllocFromPoolAsync(nbytes, self._pool, self._stream)
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            self.trim()
            error, address = self._cuda.cuMemAllocFromPoolAsync(nbytes, self._pool, self._stream)
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self._check(self._cuda.cuMemGetInfo())
            raise OutOfMemory(
                f"GPU {self.number} has {free / 2**20:,.0f} of {total / 2**20:,.0f} MiB left, and "
                f"{nbytes / 2**20:,.0f} more are needed: lower --max-slots, or serve fewer models"
            )
        self._check((error,))
        self._owned.addresses.add(int(address))
        self.zero(int(address), nbytes)
        return int(address)

    def trim(self) -> None:
        """The pool keeps what is freed, in the pieces that it was; and what is freed behind work that is still to be
        done may be nobody's yet."""
        self.enter()
        self._free_unused()
        self.finish()
        self._check(self._cuda.cuMemPoolTrimTo(self._pool, 0))

    def free(self, address: int) -> None:
        """From any thread and at any moment, so it is only noted here: freed by the collector of garbage in the midst
        of a recording, it would become a part of that."""
        self._owned.unused.append((address, None))

    def _free_unused(self, reached: int = 0) -> None:
        """Memory of the device when the stream comes to it; pinned memory, when the stream has passed what used it."""
        owned = self._owned
        for _ in range(len(owned.unused)):
            address, after = owned.unused.popleft()
            if after is None:
                owned.addresses.discard(address)
                self._check(self._cuda.cuMemFreeAsync(address, self._stream))
            elif after < 0:
                owned.unused.append((address, self._marks))  # what has been asked for until now may use it
            elif after < reached:
                owned.pinned.pop(address)
                self._check(self._cuda.cuMemFreeHost(address))
            else:
                owned.unused.append((address, after))

    def memory(self) -> MemoryUse:
        self.enter()
        free, total = self._check(self._cuda.cuMemGetInfo())
        names = self._cuda.CUmemPool_attribute
        used, reserved = (
            int(self._check(self._cuda.cuMemPoolGetAttribute(self._pool, each)))
            for each in (names.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        )
        return MemoryUse(used, reserved, int(free), int(total))

    def populate(self, address: int, start: int, nbytes: int) -> int:
        return 0

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self.enter()
        error, address = self._cuda.cuMemHostAlloc(nbytes, 0)
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"the host has no {nbytes / 2**20:,.1f} MiB left that a GPU can copy from")
        self._check((error,))
        address = int(address)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        self._owned.pinned[address] = nbytes
        freed = weakref.finalize(array, self._owned.unused.append, (address, -1))
        freed.atexit = False
        return array

    # -- work, in order ----------------------------------------------------------------------------------------

    def upload(self, address: int, array: NDArray[Any]) -> None:
        if array.nbytes == 0:
            return
        self.enter()
        if self._owned.is_pinned(array.ctypes.data):
            self._upload(address, array.ctypes.data, array.nbytes)
            return
        if self._uploads is None:
            self._uploads = Uploads(self)
        for offset, host in self._uploads.parts(array):
            self._upload(address + offset, host.ctypes.data, host.nbytes)

    def _upload(self, address: int, host: int, nbytes: int) -> None:
        self._count(nbytes)
        self._check(self._cuda.cuMemcpyHtoDAsync(address, host, nbytes, self._stream))

    def _count(self, nbytes: int) -> None:
        self.copies += 1
        self.copied_bytes += nbytes

    def download(self, array: NDArray[Any], address: int) -> None:
        self.enter()
        self._count(array.nbytes)
        self._check(self._cuda.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self._stream))

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        if nbytes == 0 or rows == 0:
            return
        if rows == 1 or pitches == (nbytes, nbytes):
            self.enter()
            self._count(rows * nbytes)
            self._check(self._cuda.cuMemcpyDtoDAsync(target, source, rows * nbytes, self._stream))
        else:
            whole = (rows * pitches[0], rows * pitches[1])
            self._copy_slots(
                target, source, 1, rows, nbytes, Pitches(whole[0], pitches[0]), Pitches(whole[1], pitches[1])
            )

    def _copy_slots(
        self, target: int, source: int, slots: int, rows: int, nbytes: int, into: Pitches, out_of: Pitches
    ) -> None:
        """slots x rows pieces, as one copy."""
        self.enter()
        self._count(slots * rows * nbytes)
        device = self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        wanted = self._cuda.CUDA_MEMCPY3D()
        wanted.srcMemoryType = wanted.dstMemoryType = device
        wanted.dstDevice, wanted.srcDevice = target, source
        wanted.dstPitch, wanted.srcPitch = into.row, out_of.row
        wanted.dstHeight, wanted.srcHeight = into.slot // into.row, out_of.slot // out_of.row
        wanted.WidthInBytes, wanted.Height, wanted.Depth = nbytes, rows, slots
        self._check(self._cuda.cuMemcpy3DAsync(wanted, self._stream))

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
        if slots == 0 or rows == 0 or nbytes == 0:
            if clear is not None:
                clear(None)
            return
        each = rows * nbytes
        # Whoever clears everything in between needs all of it elsewhere; else parts, in an order in which none is
        # written to before it was read.
        many = slots if clear is not None else max(1, min(slots, SCRATCH_BYTES // each))
        scratch = self._scratch_for(many * each)
        begins = range(0, slots, many)
        for begin in reversed(begins) if new.slot > old.slot else begins:
            count, dense = min(many, slots - begin), Pitches(each, nbytes)
            self._copy_slots(scratch, address + begin * old.slot, count, rows, nbytes, dense, old)
            if clear is not None:
                clear(None)
            self._copy_slots(address + begin * new.slot, scratch, count, rows, nbytes, new, dense)

    def gather(self, target: int, source: int, index: Ints, entry: int, rows: int, pitches: tuple[int, int]) -> None:
        """One kernel, and one copy back from where it wrote."""
        count = len(index)
        if count == 0 or rows == 0:
            return
        self.reserve(0, index.nbytes)
        self.upload(self._index, index)
        nbytes = count * entry
        scratch = self._scratch_for(rows * nbytes)
        word = 16 if (entry | pitches[1] | source) % 16 == 0 else 1
        words = entry // word
        self._launch(
            f"gather_{word}",
            rows * count * words,
            (scratch, source, self._index, count, words, rows, count * words, pitches[1] // word),
        )
        self.copy(target, scratch, nbytes, rows, (pitches[0], nbytes))

    def _launch(self, kernel: str, threads: int, arguments: tuple[int, ...]) -> None:
        self.enter()
        function = self._check(self._cuda.cuModuleGetFunction(self._module, kernel.encode()))
        blocks = min(_MOST_BLOCKS, -(-threads // _THREADS))
        passed = (arguments, (ctypes.c_void_p,) * 3 + (ctypes.c_int64,) * (len(arguments) - 3))
        self._check(self._cuda.cuLaunchKernel(function, blocks, 1, 1, _THREADS, 1, 1, 0, self._stream, passed, 0))

    def _scratch_for(self, nbytes: int) -> int:
        if nbytes > self._scratch_bytes:
            self._scratch, self._scratch_bytes = self._replaced(self._scratch, nbytes), nbytes
        return self._scratch

    def reserve(self, scratch: int, index: int) -> None:
        self._scratch_for(scratch)
        if index > self._index_bytes:
            self._index, self._index_bytes = self._replaced(self._index, aligned(index)), index

    def _replaced(self, old: int, nbytes: int) -> int:
        new = self.allocate(nbytes)
        if old:
            self.free(old)
        return new

    def zero(self, address: int, nbytes: int, rows: int = 1, pitch: int = 0) -> None:
        if nbytes == 0 or rows == 0:
            return
        self.enter()
        if rows == 1 or pitch == nbytes:
            self._check(self._cuda.cuMemsetD8Async(address, 0, rows * nbytes, self._stream))
        else:
            self._check(self._cuda.cuMemsetD2D8Async(address, pitch, 0, nbytes, rows, self._stream))

    def mark(self, timed: bool = False) -> Mark:
        self.enter()
        if not self._recorder.active:
            self._free_unused()
        self._marks += 1
        unused = self._owned.events[timed]
        made = Mark(unused.pop() if unused else self._new_event(timed), self._marks, timed)
        try:
            self._check(self._cuda.cuEventRecord(made.event, self._stream))
        except BaseException:
            self.forget(made)
            raise
        return made

    def _new_event(self, timed: bool) -> Any:
        flags = self._cuda.CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self._owned.made_events.append(self._check(self._cuda.cuEventCreate(kind)))
        return self._owned.made_events[-1]

    def wait(self, mark: Mark) -> None:
        self.enter()
        self.waits += 1
        try:
            self._check(self._cuda.cuEventSynchronize(mark.event))
        finally:
            self.forget(mark)
        self._free_unused(reached=mark.number)

    def forget(self, mark: Mark) -> None:
        self._owned.events[mark.timed].append(mark.event)

    def seconds(self, begin: Mark, end: Mark) -> float:
        self.enter()
        milliseconds: float = self._check(self._cuda.cuEventElapsedTime(begin.event, end.event))
        return milliseconds / 1000

    def finish(self) -> None:
        self.enter()
        self.waits += 1
        self._check(self._cuda.cuStreamSynchronize(self._stream))

    def drain(self) -> bool:
        _, before = self._cuda.cuCtxGetCurrent()
        try:
            with suppress(ComputeError):
                self.finish()
            return not is_lost(self)
        finally:
            self._cuda.cuCtxSetCurrent(before)

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        return self._recorder.record(work, self.enter)
