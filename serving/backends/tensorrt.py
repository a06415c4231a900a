"""TensorRT plans as the graphs of a version.

`Runtime`, `Engine` and `Context` are all that is used of the library, so that CI can run everything else here over an
emulator (`tests/support/emulator.py`) that executes the same graphs on the CPU and refuses what TensorRT would refuse.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from beamline.serving.backends.capture_gate import Gate, gate_of
from beamline.serving.backends.device import DeviceTensor, Gpu, GraphSpec, TensorSpec, with_trim
from beamline.serving.backends.late_graphs import LateGraphs
from beamline.serving.backends.memory_messages import is_about_memory
from beamline.serving.backends.tensorrt_messages import listener_of, rebuild_helps, together
from beamline.serving.contract.files import read_bytes
from beamline.serving.contract.manifest import AnyManifest
from beamline.serving.contract.tensorrt_plans import PlanCard, Plans, plan_path, usable_plans
from beamline.serving.errors import ComputeError, ModelError, OutOfMemory


class Context(Protocol):
    """One execution of a plan. Shapes and addresses stay set until they are changed."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_address(self, name: str, address: int) -> bool: ...

    def enqueue(self) -> bool:
        """On the device's stream."""

    def last_error(self) -> str:
        """What the library said in the last call, where it refused that."""


class Engine(Protocol):
    activation_bytes: int

    def context(self, activations: int) -> Context:
        """Its intermediate values are kept at this address."""


class Runtime(Protocol):
    module: str
    version: str
    capability: str
    records: bool  # whether a launch may be recorded as a CUDA graph by us

    def load(self, path: Path, card: PlanCard) -> Engine: ...


class TensorRtRunner:
    def __init__(self, folder: Path, manifest: AnyManifest, device: Gpu, runtime: Runtime, alone: str = "") -> None:
        self._folder = folder
        self._device = device
        self._runtime = runtime
        self.records = self.own_contexts = runtime.records
        module, version = runtime.module, runtime.version
        self.plans: Plans = usable_plans(folder, manifest, module, version, runtime.capability, alone)
        self.max_slots: int | None = self.plans.max_slots
        self._engines: dict[tuple[str, int | None], Engine] = {}
        self._contexts: dict[tuple[str, int | None], _Shared] = {}
        self._late = LateGraphs()
        self._activations = 0
        self._activation_bytes = 0
        for key in self.plans.cards:
            if key[0] != "score":  # on first use
                self._engines[key] = self._load(key)
        self._make_room(max((each.activation_bytes for each in self._engines.values()), default=0))
        for key, engine in self._engines.items():  # now, when there is memory, and nobody waits
            self._contexts[key] = _Shared(engine.context(self._activations))
        weakref.finalize(self, _close, device, self._contexts, self._engines).atexit = False
        self._stream_owner = device  # the last attribute: contexts and engines go before their stream

    def spec(self, graph: str) -> GraphSpec:
        """As in the portable graph: the axis of the cache has its name."""
        card = next(card for (name, _), card in self.plans.cards.items() if name == graph)
        return GraphSpec(
            tuple(TensorSpec(each.name, each.dtype, each.axes) for each in card.inputs),
            tuple(TensorSpec(each.name, each.dtype, each.axes) for each in card.outputs),
        )

    def cache_length(self, entries: int) -> int:
        buckets = self.plans.cache_buckets
        if entries > buckets[-1]:
            raise ComputeError(f"{entries} cache entries are needed, and the plans hold {buckets[-1]}")
        return buckets[bisect_left(buckets, entries)]

    def most(self, graph: str, axis: str) -> int | None:
        return next(card.most(axis) for (name, _), card in self.plans.cards.items() if name == graph)

    def prepare(self, graph: str, tensors: Mapping[str, DeviceTensor], keep: bool = False) -> Callable[[], None]:
        key = self._key(graph, tensors)
        card = self.plans.cards[key]
        _check_binding(card, tensors)
        engine = self._engine(key)
        if keep and self.records:  # a recorded launch breaks when its context is changed, so it gets its own
            context = engine.context(self._activations)
            _bind(context, card, tensors)
            return lambda: _enqueue(context, card)
        if key not in self._contexts:
            self._contexts[key] = _Shared(engine.context(self._activations))
        return self._contexts[key].launch(card, dict(tensors))

    def _key(self, graph: str, tensors: Mapping[str, DeviceTensor]) -> tuple[str, int | None]:
        """The plan of this cache length, where the graph has a cache."""
        card = next(card for (name, _), card in self.plans.cards.items() if name == graph)
        lengths = {
            tensors[each.name].shape[place]
            for each in card.inputs
            for place, axis in enumerate(each.axes)
            if axis == "C"
        }
        key = (graph, lengths.pop() if lengths else None)
        if lengths or key not in self.plans.cards:
            raise ComputeError(f"there is no plan of {graph} for a cache length of {key[1]}")
        return key

    def _engine(self, key: tuple[str, int | None]) -> Engine:
        if key not in self._engines:
            with self._late.opening(key[0]):
                engine = with_trim(self._device, lambda: self._load(key))
                self._make_room(engine.activation_bytes)
            self._engines[key] = engine
        return self._engines[key]

    def _load(self, key: tuple[str, int | None]) -> Engine:
        card = self.plans.cards[key]
        return self._runtime.load(plan_path(self._folder, card), card)

    def _make_room(self, nbytes: int) -> None:
        """For activations, shared by all contexts: nothing runs side by side on one stream. Those that exist keep the
        room that they have, so more is asked for as seldom as can be."""
        if nbytes > self._activation_bytes:
            self._activations = self._device.allocate(nbytes)
            self._activation_bytes = nbytes


def _close(device: Gpu, *made: dict[Any, Any]) -> None:
    """Contexts and engines, when what they were asked for is over, and nothing is recorded."""
    device.drain()
    with gate_of(device.number).opening():
        for each in made:
            each.clear()


class _Shared:
    """One context for launches of many shapes: it is set to a launch's shapes when that is called."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._bound: object = None

    def launch(self, card: PlanCard, tensors: Mapping[str, DeviceTensor]) -> Callable[[], None]:
        def call() -> None:
            if self._bound is not tensors:
                self._bound = None  # where that fails, by half
                _bind(self._context, card, tensors)
                self._bound = tensors
            _enqueue(self._context, card)

        return call


def _check_binding(card: PlanCard, tensors: Mapping[str, DeviceTensor]) -> None:
    """In sentences: TensorRT itself would only say no, or compute something else."""
    for output, source in card.aliases.items():
        if tensors[output].address != tensors[source].address:
            raise ComputeError(f"{card.title}: {output} must be bound where {source} is")
    for each in card.inputs:
        tensor = tensors[each.name]
        if tensor.dtype != each.dtype:
            raise ComputeError(f"{card.title}: {each.name} is {tensor.dtype}; the plan takes {each.dtype}")
        if not card.profile[each.name].holds(tensor.shape):
            allowed = card.profile[each.name]
            raise ComputeError(
                f"{card.title}: {each.name} has the shape {tensor.shape}; the plan takes {allowed.smallest} to "
                f"{allowed.largest}"
            )


def _bind(context: Context, card: PlanCard, tensors: Mapping[str, DeviceTensor]) -> None:
    for each in card.inputs:
        if not context.set_shape(each.name, tensors[each.name].shape):
            shape = tensors[each.name].shape
            raise ComputeError(f"{card.title}: TensorRT refused {each.name} as {shape}: {context.last_error()}")
    for each in (*card.inputs, *card.outputs):
        if not context.set_address(each.name, tensors[each.name].address):
            raise ComputeError(f"{card.title}: TensorRT refused the address of {each.name}: {context.last_error()}")


def _enqueue(context: Context, card: PlanCard) -> None:
    if not context.enqueue():
        why = context.last_error()
        kind = OutOfMemory if is_about_memory(why) else ComputeError
        raise kind(f"{card.title}: TensorRT could not run it: {why}")


# -- the library itself ----------------------------------------------------------------------------------------------


class LibraryRuntime:
    """`tensorrt` or `tensorrt_rtx`. Make one only where a probe has found a device: without a driver the library
    crashes the process."""

    def __init__(self, library: Any, name: str, device: int, stream: int, capability: str) -> None:
        self.module = name
        self.version = str(library.__version__)
        self.capability = capability
        self._library = library
        self._stream = stream
        self._gate = gate_of(device)
        self._logger = listener_of(library, name)
        self._runtime = library.Runtime(self._logger)
        # tensorrt_rtx compiles and captures by itself; to capture it from outside would record its compiling.
        self.records = name == "tensorrt"

    def load(self, path: Path, card: PlanCard) -> Engine:
        self._logger.forget()
        plan = read_bytes(path)
        with self._gate.opening():
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            why = together(self._logger.errors)
            advice = "; run `beamline build --rebuild`" if rebuild_helps(why) else ""
            kind = OutOfMemory if is_about_memory(why) else ModelError
            raise kind(f"{path} can't be loaded by {self.module} {self.version}: {why}{advice}")
        for output, source in card.aliases.items():
            if engine.get_aliased_input_tensor(output) != source:
                raise ModelError(f"{path} does not write {output} where {source} is; run `beamline build --rebuild`")
        whole_graphs = not self.records
        return _LibraryEngine(self._library, engine, self._stream, self._gate, self._logger, whole_graphs)


class _LibraryEngine:
    def __init__(self, library: Any, engine: Any, stream: int, gate: Gate, logger: Any, whole_graphs: bool) -> None:
        self._library = library
        self._engine = engine
        self._stream = stream
        self._gate = gate
        self._logger = logger
        self._whole_graphs = whole_graphs
        self.activation_bytes = int(engine.device_memory_size_v2)

    def context(self, activations: int) -> Context:
        strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        self._logger.forget()
        how = strategy
        if self._whole_graphs:
            how = config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.cuda_graph_strategy = self._library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        with self._gate.opening():
            context = self._engine.create_execution_context(how)
        if context is None:
            why = together(self._logger.errors)
            kind = OutOfMemory if is_about_memory(why) else ComputeError
            raise kind(f"TensorRT could not make an execution context: {why}")
        context.set_device_memory(activations, self.activation_bytes)
        return _LibraryContext(context, self._stream, self._logger)


class _LibraryContext:
    def __init__(self, context: Any, stream: int, logger: Any) -> None:
        self._context = context
        self._stream = stream
        self._logger = logger

    def last_error(self) -> str:
        return together(self._logger.errors)

    def set_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._logger.forget()
        return bool(self._context.set_input_shape(name, shape))

    def set_address(self, name: str, address: int) -> bool:
        self._logger.forget()
        return bool(self._context.set_tensor_address(name, address))

    def enqueue(self) -> bool:
        self._logger.forget()
        return bool(self._context.execute_async_v3(self._stream))
