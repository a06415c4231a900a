"""`cuda.bindings.runtime` without a GPU: the calls that we make, over an emulated device.

Every call is first made for real. Without a driver that does nothing but take the arguments, so a wrong number or type
of them is found here. What CUDA would not forgive is refused: work on another stream, a handle that was destroyed,
pageable memory while recording. New memory is full of garbage, as CUDA's is.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import runtime
from numpy.typing import NDArray

from tests.support.emulator import EmulatedDevice, Refused

_GARBAGE = 0xA5
_STREAM = 77
_OK, _NO_DRIVER = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorInsufficientDriver


class EmulatedCuda:
    """Takes the module's place."""

    def __init__(self) -> None:
        self.device = EmulatedDevice()
        self.calls: list[str] = []
        self._work = _Work(self.device)

    def __getattr__(self, name: str) -> Any:
        theirs, ours = getattr(runtime, name), getattr(self._work, name, None)
        if ours is None:
            return theirs  # a constant, or what needs no driver

        def call(*arguments: Any) -> tuple[Any, ...]:
            error, *_ = theirs(*arguments)
            assert error == _NO_DRIVER, f"{name} did something"
            self.calls.append(name)
            return _OK, *ours(*arguments)

        return call


class _Work:
    """What each call does; the results behind its error code."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._numbers = itertools.count(1)
        self._pinned: dict[int, NDArray[np.uint8]] = {}
        self._marks: dict[int, int] = {}  # of events; 0 where it is not recorded yet
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._executables: dict[int, list[Callable[[], None]]] = {}

    def cudaSetDevice(self, device: int) -> tuple[()]:
        assert device == 0
        return ()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any]:
        assert flags == runtime.cudaStreamNonBlocking
        return (runtime.cudaStream_t(_STREAM),)

    def cudaStreamDestroy(self, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.finish()
        return ()

    # -- memory ------------------------------------------------------------------------------------------------

    def cudaMallocAsync(self, size: int, stream: Any) -> tuple[int]:
        self._on(stream)
        address = self._device.allocate(size)
        self._device.bytes_at(address, size)[...] = _GARBAGE
        return (address,)

    def cudaFreeAsync(self, address: int, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.free(address)
        return ()

    def cudaMemGetInfo(self) -> tuple[int, int]:
        return 2**20, 2**30

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[int]:
        array = np.full(size, _GARBAGE, np.uint8)
        self._pinned[array.ctypes.data] = array
        return (array.ctypes.data,)

    def cudaFreeHost(self, address: int) -> tuple[()]:
        self._device.finish()  # as CUDA does: something may still be on its way there
        del self._pinned[address]
        return ()

    def cudaPointerGetAttributes(self, address: int) -> tuple[Any]:
        kinds = runtime.cudaMemoryType
        kind = kinds.cudaMemoryTypeHost if self._is_pinned(address, 1) else kinds.cudaMemoryTypeUnregistered
        return (SimpleNamespace(type=kind),)

    def _is_pinned(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + len(a) for start, a in self._pinned.items())

    # -- work, in order ----------------------------------------------------------------------------------------

    def _on(self, stream: Any) -> None:
        if int(stream) != _STREAM:
            raise Refused(f"the stream {int(stream)} is not ours")

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        kinds = runtime.cudaMemcpyKind
        if kind == kinds.cudaMemcpyDeviceToDevice:
            self._device.copy(target, source, nbytes)
        elif kind == kinds.cudaMemcpyHostToDevice:
            self._upload(target, source, nbytes)
        elif kind == kinds.cudaMemcpyDeviceToHost:
            self._download(target, source, nbytes)
        else:
            raise Refused(f"{kind} is no copy of ours")
        return ()

    def _upload(self, target: int, source: int, nbytes: int) -> None:
        data = _host(source, nbytes)
        if not self._is_pinned(source, nbytes):
            if self._device.recording:
                raise Refused("pageable memory can't be copied while recording")
            data = data.copy()

        def copy() -> None:
            self._device.bytes_at(target, nbytes)[...] = data

        self._device.launch(copy)

    def _download(self, target: int, source: int, nbytes: int) -> None:
        def copy() -> None:
            _host(target, nbytes)[...] = self._device.bytes_at(source, nbytes)

        self._device.launch(copy)
        if not self._is_pinned(target, nbytes):  # CUDA comes back only when it is there
            self._device.wait(self._device.mark())

    def cudaMemcpy2DAsync(
        self, target: int, their: int, source: int, our: int, width: int, rows: int, kind: Any, stream: Any
    ) -> tuple[()]:
        self._on(stream)
        assert kind == runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._device.copy(target, source, width, rows, (their, our))
        return ()

    def cudaMemsetAsync(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[()]:
        self._on(stream)
        assert value == 0
        self._device.zero(address, nbytes)
        return ()

    def cudaMemset2DAsync(self, address: int, pitch: int, value: int, width: int, rows: int, stream: Any) -> tuple[()]:
        self._on(stream)
        assert value == 0
        self._device.zero(address, width, rows, pitch)
        return ()

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any]:
        number = next(self._numbers)
        self._marks[number] = 0
        return (runtime.cudaEvent_t(number),)

    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        self._marks[int(event)] = self._device.mark()
        return ()

    def cudaEventSynchronize(self, event: Any) -> tuple[()]:
        self._device.wait(self._marks[int(event)])
        return ()

    def cudaEventDestroy(self, event: Any) -> tuple[()]:
        del self._marks[int(event)]
        return ()

    # -- graphs ------------------------------------------------------------------------------------------------

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[()]:
        self._on(stream)
        self._device.begin_recording()
        return ()

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Any]:
        self._on(stream)
        number = next(self._numbers)
        self._graphs[number] = self._device.end_recording()
        return (runtime.cudaGraph_t(number),)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any]:
        number = next(self._numbers)
        self._executables[number] = self._graphs[int(graph)]
        return (runtime.cudaGraphExec_t(number),)

    def cudaGraphDestroy(self, graph: Any) -> tuple[()]:
        del self._graphs[int(graph)]
        return ()

    def cudaGraphLaunch(self, executable: Any, stream: Any) -> tuple[()]:
        self._on(stream)
        self._device.replay(self._executables[int(executable)])
        return ()

    def cudaGraphExecDestroy(self, executable: Any) -> tuple[()]:
        del self._executables[int(executable)]
        return ()


def _host(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
