"""A GPU and TensorRT without either: the same narrow protocol over host memory.

Work is done only when somebody waits for it, so that code that forgets to wait reads stale values. What TensorRT or
CUDA would refuse, or not forgive, is refused: copies outside an allocation, shapes outside a profile, tensors that are
not bound, caches that are not aliased, a context that is changed after it was recorded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.converters.tensorrt.build import Built, save
from beamline.converters.tensorrt.library import Library
from beamline.converters.tensorrt.profiles import chosen_buckets, extents
from beamline.converters.tensorrt.version import graphs
from beamline.serving.backends.device import ALIGNMENT, MemoryUse, Pitches, item_bytes, sizes_of
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner
from beamline.serving.backends.tensorrt import TensorRtRunner
from beamline.serving.contract.backend import Ints
from beamline.serving.contract.manifest import AnyManifest, Manifest
from beamline.serving.contract.tensorrt_plans import ENGINES, PlanCard

MODULE, VERSION, CAPABILITY = "tensorrt", "0.emulated", "86"


class Refused(Exception):
    """A GPU would have crashed, or worse, gone on."""


class EmulatedDevice:
    part: int | None = None

    def __init__(self) -> None:
        self.stream = 0
        self.waits = self.copies = self.copied_bytes = 0
        self.recorded = 0
        self.replayed = 0
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._pinned: list[NDArray[np.uint8]] = []
        self._queue: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None
        self._done = 0  # marks that were reached

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        buffer = raw[offset : offset + nbytes]
        address = int(buffer.ctypes.data)
        self._buffers[address] = buffer
        return address

    def free(self, address: int) -> None:
        if address in self._buffers:
            self._ask(lambda: self._buffers.pop(address, None))

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

    def mark(self) -> int:
        self._marks = getattr(self, "_marks", 0) + 1
        number = self._marks

        def reached() -> None:
            self._done = number

        self._ask(reached)
        return number

    def wait(self, mark: int) -> None:
        if self._recording is not None:
            raise Refused("the host can't wait while recording")
        self.waits += 1
        while self._done < mark:
            self._queue.pop(0)()

    def forget(self, mark: int) -> None:
        pass

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


class EmulatedRuntime:
    """Plans are not executed; the graphs that they were made from are."""

    def __init__(self, device: EmulatedDevice, folder: Path, records: bool = True) -> None:
        self.module, self.version, self.capability = MODULE, VERSION, CAPABILITY
        self.records = records
        self.contexts = 0
        self._device = device
        self._folder = folder
        self._sessions: dict[str, ort.InferenceSession] = {}

    def load(self, path: Path, card: PlanCard) -> EmulatedEngine:
        if card.graph not in self._sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 2
            options.enable_mem_pattern = False
            self._sessions[card.graph] = ort.InferenceSession(
                str(self._folder / f"{card.graph}.onnx"), options, providers=["CPUExecutionProvider"]
            )
        return EmulatedEngine(self, self._device, card, self._sessions[card.graph])


class EmulatedEngine:
    activation_bytes = 4096

    def __init__(
        self, runtime: EmulatedRuntime, device: EmulatedDevice, card: PlanCard, session: ort.InferenceSession
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._card = card
        self._session = session

    def context(self, activations: int) -> EmulatedContext:
        self._device.bytes_at(activations, self.activation_bytes)
        self._runtime.contexts += 1
        return EmulatedContext(self._device, self._card, self._session)


class EmulatedContext:
    def __init__(self, device: EmulatedDevice, card: PlanCard, session: ort.InferenceSession) -> None:
        self._device = device
        self._card = card
        self._session = session
        self._inputs = {each.name: each for each in card.inputs}
        self._outputs = {each.name: each for each in card.outputs}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._recorded = False

    def set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._refuse_change()
        if name not in self._inputs or not self._card.profile[name].holds(shape):
            return False
        self._shapes[name] = shape
        return True

    def set_address(self, name: str, address: int) -> bool:
        self._refuse_change()
        if name not in self._inputs and name not in self._outputs:
            return False
        if address % ALIGNMENT:
            return False
        self._addresses[name] = address
        return True

    def _refuse_change(self) -> None:
        if self._recorded:
            raise Refused("a context was changed after a recording of it was made")

    def last_error(self) -> str:
        return "the emulator refused it"

    def enqueue(self) -> bool:
        if set(self._shapes) != set(self._inputs):
            return False
        if set(self._addresses) != {*self._inputs, *self._outputs}:
            return False
        for output, source in self._card.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return False
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        sizes = self._sizes(shapes)
        if sizes is None:
            return False
        shapes |= {name: sizes_of(each.axes, sizes) for name, each in self._outputs.items()}
        self._recorded = self._recorded or self._device.recording
        self._device.launch(lambda: self._execute(shapes, addresses))
        return True

    def _sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
        sizes: dict[str, int] = {}
        for name, each in self._inputs.items():
            for axis, size in zip(each.axes, shapes[name], strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    return None
                if isinstance(axis, int) and axis != size:
                    return None
        if self._card.cache_length is not None and sizes.get("C") != self._card.cache_length:
            return None
        return sizes

    def _execute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        binding = self._session.io_binding()
        places = {}
        for name, each in {**self._inputs, **self._outputs}.items():
            nbytes = math.prod(shapes[name]) * item_bytes(each.dtype)
            places[name] = self._device.bytes_at(addresses[name], nbytes)  # it lies in an allocation
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cpu", 0, np.dtype(each.dtype).type, list(shapes[name]), addresses[name])
        for argument in self._session.get_inputs():
            if (
                argument.name not in self._inputs
            ):  # nobody reads it, so a plan lacks it; ONNX Runtime wants it all the same
                sizes = self._sizes(shapes) or {}
                binding.bind_cpu_input(argument.name, np.zeros(sizes_of(tuple(argument.shape), sizes), np.float32))
        for output in self._outputs:
            for source in self._inputs:
                if self._card.aliases.get(output) != source and np.shares_memory(places[output], places[source]):
                    raise Refused(f"{output} lies over {source}, which is still being read")
        self._session.run_with_iobinding(binding)


def write_emulated_plans(folder: Path, manifest: AnyManifest, buckets: tuple[int, ...] = (), slots: int = 32) -> None:
    """Cards as a build would write them; the plans themselves hold nothing but their own name."""
    library = Library(MODULE, _Module)
    sizes = extents(manifest, slots)
    for graph in graphs(folder, manifest, chosen_buckets(manifest, buckets)):
        name = f"{graph.name} {graph.cache_length}"
        built = Built(name.encode(), graph.inputs, graph.outputs, {}, None, 0.0)
        save(built, graph, sizes, folder / ENGINES, manifest, library, CAPABILITY)


class _Module:
    __version__ = VERSION


def emulated_backend(
    folder: Path, manifest: Manifest, records: bool = True, device: EmulatedDevice | None = None
) -> tuple[GpuBackend, TensorRtRunner, EmulatedDevice]:
    device = device or EmulatedDevice()
    runner = TensorRtRunner(folder, manifest, device, EmulatedRuntime(device, folder, records))
    return GpuBackend(manifest, device, runner), runner, device


def emulated_cuda_backend(folder: Path, manifest: Manifest) -> GpuBackend:
    """The runner of ONNX Runtime's CUDA provider, with the CPU provider behind it."""
    device = EmulatedDevice()
    runner = OnnxRuntimeCudaRunner(folder, manifest, 0, 0, place="cpu", launch=device.launch)
    return GpuBackend(manifest, device, runner)
