"""What a GPU has to be able to do, in the few words that the rest of the server uses.

A device has memory and one stream: whatever is asked of it happens later, in the order of asking. The host waits only
where it calls `wait`. `cuda.py` is the real one; `tests/support/emulator.py` does the same with host memory, and
refuses what a GPU would not forgive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 256  # bytes, of every tensor that a graph reads or writes

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES[dtype]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Device(Protocol):
    """One GPU. Addresses are plain numbers."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed. Raises `ModelError` where there is not enough."""

    def free(self, address: int) -> None:
        """When all that was asked for before is done."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from and to while the host does something else."""

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """A pinned array is read when its turn comes; any other one at once."""

    def download(self, array: NDArray[Any], address: int) -> None:
        """It is there when a later mark is reached; into a pinned array, the host need not wait for it."""

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        """`rows` pieces of `nbytes`; the pitches say how far apart they are in the target and in the source."""

    def zero(self, address: int, nbytes: int) -> None: ...

    def mark(self) -> Any:
        """The point in the stream that all that was asked for so far leads to."""

    def wait(self, mark: Any) -> None:
        """The only place where the host stands still."""

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What `work` asks for, as one piece that can be repeated (a CUDA graph); None where that can't be done. `work`
        asks for it, but it is not done yet."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a graph. An axis is a size, a name (`K`), or a multiple of one (`2*K`)."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    address: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


class GraphRunner(Protocol):
    """The graphs of one version on one device: TensorRT plans, or ONNX Runtime sessions."""

    records: bool  # whether launches may be recorded and repeated
    max_slots: int | None  # that its graphs can be run with at once

    def spec(self, graph: str) -> GraphSpec: ...

    def cache_length(self, entries: int) -> int:
        """The shortest cache that a graph can be run with and that holds so many entries."""

    def most(self, graph: str, axis: str) -> int | None:
        """The largest size of an axis that the graph can be run with; None where it has no limit."""

    def prepare(self, graph: str, tensors: Mapping[str, DeviceTensor], keep: bool = False) -> Callable[[], None]:
        """A launch of the graph on these tensors, to be called any number of times; `keep` says that it will be called
        often, so it may be worth a context of its own."""


def sizes_of(axes: tuple[str | int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else _size(axis, sizes) for axis in axes)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in axis.replace(" ", "").split("*"))
