"""What the stub CUDA libraries counted, and the faults that they are asked for; of this process or of another one.

Both map the same file (CUDA_STUB_CONTROL), whose layout is that of `device.c`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROWS, _DEVICES = 1024, 8


class _Row(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 104),
        ("calls", ctypes.c_long),
        ("bytes", ctypes.c_long),
        ("largest", ctypes.c_long),
    )


class _Control(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("magic", "fail_allocation", "fail_times", "fail_launch")),
        *((name, ctypes.c_long) for name in ("lost", "lost_by")),
        ("fail_name", ctypes.c_char * 104),
        *((name, ctypes.c_long) for name in ("fail_call", "fail_loses", "allocations", "launches")),
        *(
            (name, ctypes.c_long)
            for name in ("pinned_bytes", "streams", "events", "graphs", "handles", "library_handles")
        ),
        ("device_bytes", ctypes.c_long * _DEVICES),
        ("rows", ctypes.c_long),
        ("row", _Row * _ROWS),
    )


@dataclass(frozen=True, slots=True)
class Count:
    calls: int
    bytes: int
    largest: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the process has of CUDA's."""

    device_bytes: tuple[int, ...]
    pinned_bytes: int
    streams: int
    events: int
    graphs: int
    handles: int  # pools and modules
    library_handles: int  # of cuBLAS, cuDNN and the others, which ONNX Runtime makes


class Stub:
    def __init__(self, control: Path) -> None:
        with control.open("r+b") as file:
            file.truncate(ctypes.sizeof(_Control))
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._map)

    @classmethod
    def of_this_process(cls) -> Stub:
        return cls(Path(os.environ["CUDA_STUB_CONTROL"]))

    def reset(self) -> None:
        for row in self._control.row[: self._control.rows]:
            row.calls = row.bytes = row.largest = 0

    def counts(self) -> dict[str, Count]:
        """By name, since the last reset."""
        rows = self._control.row[: self._control.rows]
        return {row.name.decode(): Count(row.calls, row.bytes, row.largest) for row in rows if row.calls}

    @property
    def wrong(self) -> list[str]:
        """What CUDA would have refused, or not forgiven."""
        return [name for name in self.counts() if name.startswith("WRONG")]

    @property
    def held(self) -> Held:
        control = self._control
        kept = (control.pinned_bytes, control.streams, control.events, control.graphs)
        return Held(tuple(control.device_bytes), *kept, control.handles, control.library_handles)

    @property
    def allocations(self) -> int:
        return int(self._control.allocations)

    @property
    def launches(self) -> int:
        return int(self._control.launches)

    def fail_allocation(self, number: int, times: int = 1) -> None:
        """The n-th from now, and those that follow until it were so many; 0 times: all. The 0th: none."""
        self._control.fail_times, self._control.fail_allocation = times, number

    def fail_launch(self, number: int) -> None:
        self._control.fail_launch = number

    def fail_call(self, name: str, number: int, loses: bool = False) -> None:
        """The n-th call from now of one function of CUDA's, or `kernel launch`: it fails alone, or with its device."""
        self._control.fail_name, self._control.fail_call = name.encode(), number
        self._control.fail_loses = int(loses)

    def lose(self, device: int | None, error: int = 0) -> None:
        """From now on it answers nothing but an error, as CUDA numbers them. None: it is there again."""
        self._control.lost_by = error
        self._control.lost = 0 if device is None else device + 1

    def heal(self) -> None:
        self.fail_allocation(0)
        self.fail_launch(0)
        self.fail_call("", 0)
        self.lose(None)


def waits(counts: Mapping[str, Count]) -> int:
    """How often the host stood still."""
    names = ["cuEventSynchronize", "cuStreamSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"]
    names += ["cudaDeviceSynchronize", "cuCtxSynchronize", "wait for a copy"]
    return sum(counts[name].calls for name in names if name in counts)
