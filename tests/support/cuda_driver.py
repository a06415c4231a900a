"""`cuda.bindings.driver` without a GPU: the calls that we make, over an emulated device that computes real numbers.

What CUDA would not forgive is refused: work on another stream, a handle that was destroyed, pageable memory while
recording. New memory is full of garbage, as CUDA's is. That the arguments are what the bindings take is shown over the
stub libraries (tests/cuda_stub).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from tests.support.emulated_device import EmulatedDevice, Refused

_GARBAGE = 0xA5
_STREAM, _POOL, _MODULE = 77, 78, 79
_OK = driver.CUresult.CUDA_SUCCESS


class EmulatedCuda:
    """Takes the module's place."""

    def __init__(self) -> None:
        self.device = EmulatedDevice()
        self.calls: list[str] = []
        self.failing: dict[str, Any] = {}  # what the next call of a name says, instead of doing it
        self._work = _Work(self.device)

    @property
    def events(self) -> int:
        """That were created and not destroyed."""
        return len(self._work._marks)

    def __getattr__(self, name: str) -> Any:
        ours = getattr(self._work, name, None)
        if ours is None:
            return getattr(driver, name)  # a constant, or a type
        assert hasattr(driver, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.failing:
                return (self.failing.pop(name),)
            return _OK, *ours(*arguments)

        return call


class _Work:
    """What each call does; the results behind its error code."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._numbers = itertools.count(1)
        self._pinned: dict[int, NDArray[np.uint8]] = {}
        self._marks: dict[int, int] = {}  # of events; 0 where it is not recorded yet
        self._timed: set[int] = set()
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._executables: dict[int, list[Callable[[], None]]] = {}

    def cuInit(self, flags: int) -> tuple[()]:
        return ()

    def cuGetErrorString(self, error: Any) -> tuple[bytes]:
        return (error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode(),)

    def cuDeviceGet(self, number: int) -> tuple[int]:
        assert number == 0
        return (number,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        return (1,)

    def cuCtxSetCurrent(self, context: Any) -> tuple[()]:
        assert context == 1
        return ()

    def cuCtxGetCurrent(self) -> tuple[int]:
        return (1,)

    def cuStreamCreate(self, flags: Any) -> tuple[Any]:
        assert flags == driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return (driver.CUstream(_STREAM),)

    def cuStreamDestroy(self, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.finish()
        return ()

    def cuStreamSynchronize(self, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.finish()
        return ()

    # -- memory ------------------------------------------------------------------------------------------------

    def cuMemPoolCreate(self, wanted: Any) -> tuple[int]:
        return (_POOL,)

    def cuMemPoolSetAttribute(self, pool: Any, attribute: Any, value: Any) -> tuple[()]:
        assert pool == _POOL
        return ()

    def cuMemPoolGetAttribute(self, pool: Any, attribute: Any) -> tuple[int]:
        return (self._device.memory().used,)

    def cuMemPoolTrimTo(self, pool: Any, kept: int) -> tuple[()]:
        assert (pool, kept) == (_POOL, 0)
        return ()

    def cuMemPoolDestroy(self, pool: Any) -> tuple[()]:
        return ()

    def cuMemAllocFromPoolAsync(self, size: int, pool: Any, stream: Any) -> tuple[int]:
        assert pool == _POOL
        self._on(stream)
        address = self._device.allocate(size)
        self._device.bytes_at(address, size)[...] = _GARBAGE
        return (address,)

    def cuMemFreeAsync(self, address: int, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.free(address)
        return ()

    def cuMemGetInfo(self) -> tuple[int, int]:
        return 2**20, 2**30

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[int]:
        array = np.full(size, _GARBAGE, np.uint8)
        self._pinned[array.ctypes.data] = array
        return (array.ctypes.data,)

    def cuMemFreeHost(self, address: int) -> tuple[()]:
        del self._pinned[address]
        return ()

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> tuple[Any]:
        kinds = driver.CUmemorytype
        return (kinds.CU_MEMORYTYPE_HOST if self._is_pinned(address, 1) else None,)

    def _is_pinned(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + len(a) for start, a in self._pinned.items())

    # -- work, in order ----------------------------------------------------------------------------------------

    def _on(self, stream: Any) -> None:
        if int(stream) != _STREAM:
            raise Refused(f"the stream {int(stream)} is not ours")

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.copy(target, source, nbytes)
        return ()

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[()]:
        self._on(stream)
        data = _host(source, nbytes)
        if not self._is_pinned(source, nbytes):
            raise Refused("a copy from pageable memory waits")

        def copy() -> None:
            self._device.bytes_at(target, nbytes)[...] = data

        self._device.launch(copy)
        return ()

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[()]:
        self._on(stream)
        if not self._is_pinned(target, nbytes):
            raise Refused("a copy to pageable memory waits")

        def copy() -> None:
            _host(target, nbytes)[...] = self._device.bytes_at(source, nbytes)

        self._device.launch(copy)
        return ()

    def cuMemcpy3DAsync(self, wanted: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        assert wanted.srcMemoryType == wanted.dstMemoryType == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if wanted.Depth > 1:
            assert wanted.Height <= min(wanted.srcHeight, wanted.dstHeight)
        pitches = wanted.dstPitch, wanted.srcPitch
        for slot in range(wanted.Depth):
            target = int(wanted.dstDevice) + slot * wanted.dstPitch * wanted.dstHeight
            source = int(wanted.srcDevice) + slot * wanted.srcPitch * wanted.srcHeight
            self._device.copy(target, source, wanted.WidthInBytes, wanted.Height, pitches)
        return ()

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[()]:
        self._on(stream)
        assert value == 0
        self._device.zero(address, nbytes)
        return ()

    def cuMemsetD2D8Async(self, address: int, pitch: int, value: int, width: int, rows: int, stream: Any) -> tuple[()]:
        self._on(stream)
        assert value == 0
        self._device.zero(address, width, rows, pitch)
        return ()

    def cuModuleLoadData(self, image: bytes) -> tuple[int]:
        assert b".entry" in image
        return (_MODULE,)

    def cuModuleUnload(self, module: Any) -> tuple[()]:
        return ()

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[str]:
        return (name.decode(),)

    def cuLaunchKernel(
        self,
        function: str,
        x: int,
        y: int,
        z: int,
        threads: int,
        by: int,
        bz: int,
        shared: int,
        stream: Any,
        arguments: Any,
        extra: int,
    ) -> tuple[()]:
        """What gather.cu does; that source itself is run over the stub libraries."""
        self._on(stream)
        (target, source, index, count, words, rows, into, out_of), _ = arguments
        word = int(function.removeprefix("gather_"))

        def gather() -> None:
            places = self._device.bytes_at(index, 8 * count).view(np.int64).tolist()
            for row in range(rows):
                for entry, place in enumerate(places):
                    to = self._device.bytes_at(target + word * (row * into + entry * words), word * words)
                    to[...] = self._device.bytes_at(source + word * (row * out_of + place * words), word * words)

        self._device.launch(gather)
        return ()

    def cuEventCreate(self, flags: int) -> tuple[Any]:
        number = next(self._numbers)
        self._marks[number] = 0
        if flags == driver.CUevent_flags.CU_EVENT_DEFAULT:
            self._timed.add(number)
        return (driver.CUevent(number),)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        self._marks[int(event)] = self._device.mark(timed=int(event) in self._timed)
        return ()

    def cuEventSynchronize(self, event: Any) -> tuple[()]:
        self._device.wait(self._marks[int(event)])
        return ()

    def cuEventElapsedTime(self, begin: Any, end: Any) -> tuple[float]:
        return (1000 * self._device.seconds(self._marks[int(begin)], self._marks[int(end)]),)

    def cuEventDestroy(self, event: Any) -> tuple[()]:
        del self._marks[int(event)]
        return ()

    # -- graphs ------------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[()]:
        self._on(stream)
        self._device.begin_recording()
        return ()

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any]:
        self._on(stream)
        number = next(self._numbers)
        self._graphs[number] = self._device.end_recording()
        return (driver.CUgraph(number),)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any]:
        number = next(self._numbers)
        self._executables[number] = self._graphs[int(graph)]
        return (driver.CUgraphExec(number),)

    def cuGraphDestroy(self, graph: Any) -> tuple[()]:
        del self._graphs[int(graph)]
        return ()

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.replay(self._executables[int(executable)])
        return ()

    def cuGraphExecDestroy(self, executable: Any) -> tuple[()]:
        del self._executables[int(executable)]
        return ()


def _host(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
