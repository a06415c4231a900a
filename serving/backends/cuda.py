"""A real GPU, through `cuda-bindings`: memory, one stream, events, and CUDA graphs.

Nothing here has been run on hardware yet; docs/gpu.md says what has been checked and how.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Ints
from beamline.serving.errors import ComputeError, ModelError

_current = threading.local()  # the device that this thread has told CUDA that it means


class CudaDevice:
    """Use it from one thread at a time. `waits` counts how often the host stood still. Its memory goes with it, so that
    of an unloaded model, too: each has its own."""

    part: int | None = None  # it copies while the host goes on

    def __init__(self, number: int) -> None:
        from cuda.bindings import runtime

        self.number = number
        self.waits = 0
        self._cuda: Any = runtime
        self._enter()
        self._stream = self._check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        self._allocated: set[int] = set()
        self._scratch = self._scratch_bytes = 0  # where copies go between that overlap; the stream keeps their order
        release = weakref.finalize(self, _release, runtime, self._stream, self._allocated)
        release.atexit = False  # the driver does that itself, and may be gone by then

    @property
    def stream(self) -> int:
        """Its address, for whoever runs graphs on it."""
        return int(self._stream)

    def _enter(self) -> None:
        """Whatever is done without a stream, or by a library, is done on the calling thread's current device."""
        if getattr(_current, "number", None) != self.number:
            self._check(self._cuda.cudaSetDevice(self.number))
            _current.number = self.number

    def _check(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if error != self._cuda.cudaError_t.cudaSuccess:
            _, text = self._cuda.cudaGetErrorString(error)
            raise ComputeError(f"CUDA device {self.number}: {text.decode() if isinstance(text, bytes) else text}")
        return values[0] if len(values) == 1 else values

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self._enter()
        error, address = self._cuda.cudaMallocAsync(nbytes, self._stream)
        if error == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            free, total = self._check(self._cuda.cudaMemGetInfo())
            raise ModelError(
                f"GPU {self.number} has {free / 2**20:,.0f} of {total / 2**20:,.0f} MiB left, and "
                f"{nbytes / 2**20:,.0f} more are needed: lower --max-slots, or serve fewer models"
            )
        self._check((error,))
        self._allocated.add(int(address))
        self.zero(int(address), nbytes)
        return int(address)

    def free(self, address: int) -> None:
        self._allocated.discard(address)
        self._cuda.cudaFreeAsync(address, self._stream)  # at exit there may be no driver any more: no check

    def populate(self, address: int, start: int, nbytes: int) -> int:
        return 0

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        address = int(self._check(self._cuda.cudaHostAlloc(nbytes, self._cuda.cudaHostAllocDefault)))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        weakref.finalize(array, self._cuda.cudaFreeHost, address)
        return array

    # -- work, in order ----------------------------------------------------------------------------------------

    def upload(self, address: int, array: NDArray[Any]) -> None:
        self._enter()
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self._cuda.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self._stream))

    def download(self, array: NDArray[Any], address: int) -> None:
        self._enter()
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self._cuda.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self._stream))

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        if nbytes == 0 or rows == 0:
            return
        self._enter()
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        if rows == 1 or pitches == (nbytes, nbytes):
            self._check(self._cuda.cudaMemcpyAsync(target, source, rows * nbytes, kind, self._stream))
        else:
            answer = self._cuda.cudaMemcpy2DAsync(
                target, pitches[0], source, pitches[1], nbytes, rows, kind, self._stream
            )
            self._check(answer)

    def move(self, target: int, source: int, nbytes: int, rows: int, pitches: tuple[int, int]) -> None:
        scratch = self._scratch_for(rows * nbytes)
        self.copy(scratch, source, nbytes, rows, (nbytes, pitches[1]))
        self.copy(target, scratch, nbytes, rows, (pitches[0], nbytes))

    def gather(self, target: int, source: int, index: Ints, entry: int, rows: int, pitches: tuple[int, int]) -> None:
        first, end = int(index.min()), int(index.max()) + 1
        pitch = (end - first) * entry
        scratch = self._scratch_for(rows * pitch)
        self.copy(scratch, source + first * entry, pitch, rows, (pitch, pitches[1]))
        for begin, origin, count in runs(index):
            piece = scratch + (origin - first) * entry
            self.copy(target + begin * entry, piece, count * entry, rows, (pitches[0], pitch))

    def _scratch_for(self, nbytes: int) -> int:
        if nbytes > self._scratch_bytes:
            if self._scratch:
                self.free(self._scratch)
            self._scratch, self._scratch_bytes = self.allocate(nbytes), nbytes
        return self._scratch

    def zero(self, address: int, nbytes: int, rows: int = 1, pitch: int = 0) -> None:
        if nbytes == 0 or rows == 0:
            return
        self._enter()
        if rows == 1 or pitch == nbytes:
            self._check(self._cuda.cudaMemsetAsync(address, 0, rows * nbytes, self._stream))
        else:
            self._check(self._cuda.cudaMemset2DAsync(address, pitch, 0, nbytes, rows, self._stream))

    def mark(self) -> Any:
        self._enter()
        event = self._check(self._cuda.cudaEventCreateWithFlags(self._cuda.cudaEventDisableTiming))
        self._check(self._cuda.cudaEventRecord(event, self._stream))
        return event

    def wait(self, mark: Any) -> None:
        self._enter()
        self.waits += 1
        self._check(self._cuda.cudaEventSynchronize(mark))
        self._check(self._cuda.cudaEventDestroy(mark))

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check(self._cuda.cudaStreamBeginCapture(self._stream, mode))
        try:
            work()
        except Exception:
            self._cuda.cudaStreamEndCapture(self._stream)  # the stream must leave capture, whatever was captured
            return None
        error, graph = self._cuda.cudaStreamEndCapture(self._stream)
        if error != self._cuda.cudaError_t.cudaSuccess:
            return None
        executable = self._check(self._cuda.cudaGraphInstantiate(graph, 0))
        self._check(self._cuda.cudaGraphDestroy(graph))

        def replay() -> None:
            self._check(self._cuda.cudaGraphLaunch(executable, self._stream))

        weakref.finalize(replay, self._cuda.cudaGraphExecDestroy, executable)
        return replay


def runs(index: Ints) -> list[tuple[int, int, int]]:
    """Neighbours stay neighbours: (where to, where from, how many)."""
    entries: list[int] = index.tolist()
    starts = [0, *(place for place, (a, b) in enumerate(pairwise(entries), 1) if b != a + 1), len(entries)]
    return [(begin, entries[begin], end - begin) for begin, end in pairwise(starts) if begin < end]


def _release(cuda: Any, stream: Any, allocated: set[int]) -> None:
    """When the work that uses it is done: the stream keeps the order."""
    for address in allocated:
        cuda.cudaFreeAsync(address, stream)
    cuda.cudaStreamDestroy(stream)
