"""What CUDA gives to the owner of a device, all of which goes back; and what it says where it refuses."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from beamline.serving.errors import ComputeError, DeviceLost

log = logging.getLogger(__name__)

# After these nothing works any more in this process: what failed on the device stays with its context, and every later
# call says it again, or that the context is gone.
_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEVICE_UNAVAILABLE",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
        "UNKNOWN",
    )
)


class Owned:
    """What CUDA has given to a device's owner, and all of which goes back: at the latest, with it."""

    def __init__(self, driver: Any, number: int, context: Any, stream: Any, pool: Any) -> None:
        self._cuda, self._number, self._context, self._stream, self._pool = driver, number, context, stream, pool
        self.addresses: set[int] = set()
        self.pinned: dict[int, int] = {}  # address -> bytes
        # Nobody needs it any more. Pinned memory with the number of marks that were made by then, or -1: not known yet.
        self.unused: deque[tuple[int, int | None]] = deque()
        self.events: dict[bool, list[Any]] = {False: [], True: []}  # that nobody waits for; timed ones apart
        self.made_events: list[Any] = []  # all of them
        self.graphs: set[int] = set()
        self.module: Any = None

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.pinned.items())

    def end_graph(self, executable: Any) -> None:
        if int(executable) in self.graphs:
            self.graphs.discard(int(executable))
            self._ended(self._cuda.cuGraphExecDestroy(executable))

    def release(self) -> None:
        """When the work that uses it is done. By the collector of garbage, so on any thread, whose device stays what it
        was. A device that is lost gives nothing back before the process ends."""
        driver = self._cuda
        _, before = driver.cuCtxGetCurrent()
        try:
            answers = driver.cuCtxSetCurrent(self._context), driver.cuStreamSynchronize(self._stream)
            if any(error.name in _LOST for (error,) in answers):
                log.warning("GPU %d is lost, with all that it held", self._number)
                return
            for answer in answers:
                self._ended(answer)
            self._give_back()
        finally:
            driver.cuCtxSetCurrent(before)

    def _give_back(self) -> None:
        driver = self._cuda
        for executable in list(self.graphs):
            self.end_graph(driver.CUgraphExec(executable))
        for event in self.made_events:
            self._ended(driver.cuEventDestroy(event))
        for address in self.addresses:
            self._ended(driver.cuMemFreeAsync(address, self._stream))
        for address in list(self.pinned):
            self._ended(driver.cuMemFreeHost(address))
        self.pinned.clear()
        self.unused.clear()
        if self.module is not None:
            self._ended(driver.cuModuleUnload(self.module))
        self._ended(driver.cuStreamSynchronize(self._stream))
        self._ended(driver.cuMemPoolDestroy(self._pool))
        self._ended(driver.cuStreamDestroy(self._stream))

    def _ended(self, answer: tuple[Any, ...]) -> None:
        if answer[0] != self._cuda.CUresult.CUDA_SUCCESS:
            log.warning("GPU %d: something could not be given back: %s", self._number, answer[0].name)


def checked(cuda: Any, number: int, answer: tuple[Any, ...]) -> Any:
    """The values of an answer; what CUDA refuses is raised as a sentence."""
    error, *values = answer
    if error != cuda.CUresult.CUDA_SUCCESS:
        _, text = cuda.cuGetErrorString(error)
        said = text.decode() if isinstance(text, bytes) else text
        kind = DeviceLost if error.name in _LOST else ComputeError
        raise kind(f"GPU {number}: CUDA says: {said}")
    return values[0] if len(values) == 1 else values
