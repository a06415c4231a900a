"""TensorRT without a GPU: the same narrow protocol, over an emulated device and the graphs that plans were made from.

What TensorRT would refuse, or not forgive, is refused: shapes outside a profile, tensors that are not bound, caches
that are not aliased, a context that is recorded before it has run twice as it is, or changed after it was recorded, or
that is gone while its work is still to be done: that of a step in flight, or of a recording that is repeated.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from beamline.converters.tensorrt.build import Built, save
from beamline.converters.tensorrt.library import Library
from beamline.converters.tensorrt.profiles import chosen_buckets, extents
from beamline.converters.tensorrt.version import graphs
from beamline.serving.backends.device import ALIGNMENT, item_bytes, sizes_of
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner
from beamline.serving.backends.tensorrt import TensorRtRunner
from beamline.serving.contract.manifest import AnyManifest, Manifest
from beamline.serving.contract.tensorrt_plans import ENGINES, PlanCard
from beamline.serving.errors import OutOfMemory
from tests.support.emulated_device import EmulatedDevice, Refused

MODULE, VERSION, CAPABILITY = "tensorrt", "0.emulated", "86"


class EmulatedRuntime:
    """Plans are not executed; the graphs that they were made from are."""

    def __init__(self, device: EmulatedDevice, folder: Path, records: bool = True) -> None:
        self.module, self.version, self.capability = MODULE, VERSION, CAPABILITY
        self.records = records
        self.contexts = 0  # that were made
        self.alive: weakref.WeakSet[EmulatedContext] = weakref.WeakSet()
        self.most_contexts: int | None = None  # that there is memory for
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
    def __init__(
        self, runtime: EmulatedRuntime, device: EmulatedDevice, card: PlanCard, session: ort.InferenceSession
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._card = card
        self._session = session
        # A longer cache takes more; and scores, with their log-probabilities, the most.
        self.activation_bytes = 2**20 if card.graph == "score" else 4096 + 256 * (card.cache_length or 0)

    def context(self, activations: int) -> EmulatedContext:
        self._device.bytes_at(activations, self.activation_bytes)
        runtime = self._runtime
        if runtime.most_contexts is not None and len(runtime.alive) >= runtime.most_contexts:
            raise OutOfMemory("the emulator has no memory for another context")
        runtime.contexts += 1
        context = EmulatedContext(self._device, self._card, self._session)
        runtime.alive.add(context)
        return context


class EmulatedContext:
    def __init__(self, device: EmulatedDevice, card: PlanCard, session: ort.InferenceSession) -> None:
        self._device = device
        self._card = card
        self._kernels = _Kernels(device, card, session)
        self._inputs, self._outputs = self._kernels.inputs, self._kernels.outputs
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._recorded = False
        self._runs = 0  # as it is

    def __del__(self) -> None:
        """Not by a weak reference: the collector of garbage clears those before it calls anybody who may still wait."""
        self._kernels.context_is_gone = True

    def set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._refuse_change()
        if name not in self._inputs or not self._card.profile[name].holds(shape):
            return False
        self._shapes[name] = shape
        self._runs = 0
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
        sizes = self._kernels.sizes(shapes)
        if sizes is None:
            return False
        shapes |= {name: sizes_of(each.axes, sizes) for name, each in self._outputs.items()}
        if self._device.recording and self._runs < 2:
            raise Refused("a context was recorded that has not run twice with these shapes")
        self._recorded = self._recorded or self._device.recording
        self._runs += 1
        kernels = self._kernels
        self._device.launch(lambda: kernels.execute(shapes, addresses))
        return True


class _Kernels:
    """What a context asked for. They point into its memory, and don't keep it."""

    def __init__(self, device: EmulatedDevice, card: PlanCard, session: ort.InferenceSession) -> None:
        self.context_is_gone = False
        self.inputs = {each.name: each for each in card.inputs}
        self.outputs = {each.name: each for each in card.outputs}
        self._device = device
        self._card = card
        self._session = session

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
        sizes: dict[str, int] = {}
        for name, each in self.inputs.items():
            for axis, size in zip(each.axes, shapes[name], strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    return None
                if isinstance(axis, int) and axis != size:
                    return None
        if self._card.cache_length is not None and sizes.get("C") != self._card.cache_length:
            return None
        return sizes

    def execute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        if self.context_is_gone:
            raise Refused("a context is gone, and its work was not done yet")
        binding = self._session.io_binding()
        places = {}
        for name, each in {**self.inputs, **self.outputs}.items():
            nbytes = math.prod(shapes[name]) * item_bytes(each.dtype)
            places[name] = self._device.bytes_at(addresses[name], nbytes)  # it lies in an allocation
            bind = binding.bind_input if name in self.inputs else binding.bind_output
            bind(name, "cpu", 0, np.dtype(each.dtype).type, list(shapes[name]), addresses[name])
        for argument in self._session.get_inputs():
            if (
                argument.name not in self.inputs
            ):  # nobody reads it, so a plan lacks it; ONNX Runtime wants it all the same
                sizes = self.sizes(shapes) or {}
                binding.bind_cpu_input(argument.name, np.zeros(sizes_of(tuple(argument.shape), sizes), np.float32))
        for output in self.outputs:
            for source in self.inputs:
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


def emulated_cuda_backend(folder: Path, manifest: Manifest, device: EmulatedDevice | None = None) -> GpuBackend:
    """The runner of ONNX Runtime's CUDA provider, with the CPU provider behind it."""
    device = device or EmulatedDevice()
    runner = OnnxRuntimeCudaRunner(folder, manifest, 0, 0, place="cpu", launch=device.launch, owner=device)
    return GpuBackend(manifest, device, runner)
