"""What the memory of slots has to be able to do, wherever it is, and what a GPU has to be able to do besides.

A `Device` is the host's memory (`host.py`) or a GPU's. A `Gpu` also has a stream: whatever is asked of it happens
later, in the order of asking, and the host waits only where it calls `wait`. `cuda.py` is the real one;
`tests/support/emulated_device.py` does the same with host memory, and refuses what a GPU would not forgive.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from beamline.serving.contract.backend import Ints
from beamline.serving.errors import ComputeError, ModelError, OutOfMemory

ALIGNMENT = 256  # bytes, of every tensor that a graph reads or writes
SCRATCH_BYTES = 64 * 2**20  # of a GPU, for copies whose places overlap; what is larger is done in parts

T = TypeVar("T")

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES[dtype]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Pitches(NamedTuple):
    """How many bytes lie between the beginnings of two slots, and of two rows of a slot."""

    slot: int
    row: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of a GPU, in bytes: what a model uses and holds on to, and what there is at all."""

    used: int
    reserved: int
    free: int
    total: int


class Device(Protocol):
    """Memory, and the copies within it. Addresses are plain numbers."""

    # How many bytes may be copied between two steps without a pause that somebody notices; None where the device copies
    # while the host goes on.
    part: int | None

    def allocate(self, nbytes: int) -> int:
        """Zeroed. Raises `ModelError` where there is not enough."""

    def free(self, address: int) -> None:
        """When all that was asked for before is done."""

    def populate(self, address: int, start: int, nbytes: int) -> int:
        """Takes a part of an allocation from the operating system before it is used; how many bytes that were. 0 where
        memory that is allocated is there."""

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """A pinned array is read when its turn comes; any other one at once."""

    def copy(self, target: int, source: int, nbytes: int, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> None:
        """`rows` pieces of `nbytes`; the pitches say how far apart they are in the target and in the source. Target and
        source don't overlap."""

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
        """Each of the first `rows` rows of each slot keeps its first `nbytes` bytes, and lies elsewhere in the same
        allocation. `clear` wipes what a slot did not have before, or, without a number, all slots; and is called so
        that nothing is lost by it."""

    def gather(self, target: int, source: int, index: Ints, entry: int, rows: int, pitches: tuple[int, int]) -> None:
        """Entry i of each row of the target becomes entry index[i] of the same row of the source; an entry has `entry`
        bytes. Target and source may overlap."""

    def zero(self, address: int, nbytes: int, rows: int = 1, pitch: int = 0) -> None:
        """`rows` pieces of `nbytes`, a pitch apart."""


class Gpu(Device, Protocol):
    """A device with a stream of its own."""

    number: int
    waits: int  # how often the host stood still
    copies: int  # that were asked for
    copied_bytes: int

    def enter(self) -> None:
        """Makes it the one that the calling thread means: for whoever runs graphs on its stream."""

    def reserve(self, scratch: int, index: int) -> None:
        """Bytes that `relayout` and `gather` will need at most, and for the longest index: so they never fail for
        want of memory."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from and to while the host does something else."""

    def download(self, array: NDArray[Any], address: int) -> None:
        """It is there when a later mark is reached; into a pinned array, the host need not wait for it."""

    def mark(self, timed: bool = False) -> Any:
        """The point in the stream that all that was asked for so far leads to. Of a timed one the device notes when it
        got there."""

    def wait(self, mark: Any) -> None:
        """Where the host stands still, once a step."""

    def forget(self, mark: Any) -> None:
        """Nobody will wait for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The device's time between two timed marks that were reached, before anything else is marked."""

    def finish(self) -> None:
        """Waits for all that was asked for, after a failure."""

    def trim(self) -> None:
        """Gives back to the device, and so to whoever else allocates there, what is kept of freed memory. Waits."""

    def drain(self) -> bool:
        """Waits for all that was asked for, before what that uses goes: an encoder's run, say, for somebody who left
        since. On any thread, whose current device stays what it was. False where the device is lost."""

    def memory(self) -> MemoryUse: ...

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What `work` asks for, as one piece that can be repeated (a CUDA graph); None where that can't be done, or not
        now. `work` asks for it, but it is not done yet. Whoever repeats it keeps what `work` uses, such as an execution
        context."""


def is_lost(device: Gpu | None) -> bool:
    """Whether it answers nothing any more, for as long as this process lives: one that can't even say how much memory
    it has, whatever it calls that. It is asked twice, because any one call may fail."""
    if device is None:
        return False
    for _ in range(2):
        with suppress(ComputeError):
            device.memory()
            return False
    return True


def with_trim(device: Gpu | None, work: Callable[[], T]) -> T:
    """Once more where there is too little memory: what our pool keeps is not there for a library's own allocations."""
    try:
        return work()
    except OutOfMemory:
        if device is None:
            raise
    device.trim()
    return work()


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


class Allocation:
    """Memory of a device that lives as long as somebody points to this."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.address = device.allocate(aligned(max(1, nbytes)))
        weakref.finalize(self, device.free, self.address)


Tensors = dict[str, DeviceTensor]


class Graphs(Protocol):
    """The graphs of one version: what they look like, what they can be run with, and runs that happen once per request,
    in memory of their own: encoder, prefill, scores, and models that classify or embed."""

    max_slots: int | None  # that they can be run with at once

    def spec(self, graph: str) -> GraphSpec: ...

    def cache_length(self, entries: int) -> int:
        """The shortest cache that a graph can be run with and that holds so many entries."""

    def most(self, graph: str, axis: str) -> int | None:
        """The largest size of an axis that the graph can be run with; None where it has no limit."""

    def run(
        self, graph: str, feeds: Mapping[str, NDArray[Any]], bound: Mapping[str, DeviceTensor] | None = None
    ) -> tuple[Tensors, object]:
        """Its inputs and outputs; `bound` are those that are on the device already. They live as long as the second
        result."""

    def fetch(self, graph: str, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The values of some outputs."""


class GraphRunner(Protocol):
    """The graphs of one version on a GPU: TensorRT plans, or ONNX Runtime sessions."""

    records: bool  # whether launches may be recorded and repeated
    own_contexts: bool  # whether a launch that is kept then has a context of its own, which takes memory
    max_slots: int | None  # that its graphs can be run with at once

    def spec(self, graph: str) -> GraphSpec: ...

    def cache_length(self, entries: int) -> int:
        """As `Graphs`."""

    def most(self, graph: str, axis: str) -> int | None:
        """As `Graphs`."""

    def prepare(self, graph: str, tensors: Mapping[str, DeviceTensor], keep: bool = False) -> Callable[[], None]:
        """A launch of the graph on these tensors, to be called any number of times; `keep` says that it will be called
        often and may be recorded, so it is worth a context of its own."""


def sizes_of(axes: tuple[str | int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else _size(axis, sizes) for axis in axes)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in axis.replace(" ", "").split("*"))


def named_sizes(specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes of the axes that have a name."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for axis, size in zip(spec.axes, shapes.get(spec.name, ()), strict=False):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise ModelError(f"{spec.name} has {size} along {axis}, where others have {sizes[axis]}")
    return sizes


def check_slots(graphs: Graphs, slots: int) -> None:
    if graphs.max_slots is not None and slots > graphs.max_slots:
        raise ModelError(
            f"the plans hold {graphs.max_slots} requests at once: serve with --max-slots {graphs.max_slots}, "
            f"or run `beamline build --plan-slots {slots}`"
        )
