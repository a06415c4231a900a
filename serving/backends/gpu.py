"""The backend on a GPU, whatever runs the graphs there.

A step is: one upload of what the host adds, one launch, a few small copies that make its outputs the next step's
inputs, and one download of what the host wants to see. Nothing of it waits. `launch` asks for a step and `collect`
waits for the oldest one, so that the host can look at one step while the device does the next.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from numpy.typing import NDArray

from beamline.serving.backends.device import DeviceTensor, Gpu, GraphRunner, TensorSpec, named_sizes
from beamline.serving.backends.one_shot import GpuGraphs
from beamline.serving.backends.slots import FROM_HOST, SlotBackend, next_of, sizes_at
from beamline.serving.backends.staging import Staging
from beamline.serving.contract.backend import Shape, StepInputs, StepOutputs
from beamline.serving.contract.manifest import Manifest
from beamline.serving.errors import ComputeError

_MOST_LAUNCHES = 64  # kept prepared; each shape of a step is one
_USUAL_EDITS = 64  # per beam; room for longer lists is made when they come
_HOST_OUTPUTS = tuple(each.name for each in fields(StepOutputs))


@dataclass(slots=True)
class _Launch:
    """A step of one shape: how to ask for it, and how often that was done."""

    call: Callable[[], None]
    inputs: Mapping[str, DeviceTensor]
    outputs: Mapping[str, DeviceTensor]
    count: int = 0


class GpuBackend(SlotBackend):
    def __init__(self, manifest: Manifest, device: Gpu, runner: GraphRunner) -> None:
        super().__init__(manifest, device, GpuGraphs(device, runner))
        self._gpu = device
        self._runner = runner
        self._from_host = [each for each in self._step.inputs if each.name in FROM_HOST]
        outputs = {each.name: each for each in self._step.outputs}
        self._seen = {name: _output_of(name, outputs) for name in _HOST_OUTPUTS}
        self._launches: OrderedDict[object, _Launch] = OrderedDict()
        self._in_flight: deque[tuple[Any, dict[str, NDArray[Any]]]] = deque()
        self._turn = 0
        self._input_blocks: list[Staging] = []

    def allocate(self, slots: int, largest: Shape) -> int:
        nbytes = super().allocate(slots, largest)
        sizes = sizes_at(largest)
        outputs = {each.name: each for each in self._step.outputs}
        # What the host sees comes first: only that part is brought over.
        carried = sorted((next_of(each) for each in self._carried), key=lambda name: name not in self._seen.values())
        self._next_values = Staging(self._gpu, [outputs[name] for name in carried], sizes)
        reports = [name for name in self._seen.values() if name is not None and not _is_next(name)]
        self._reports = Staging(self._gpu, [outputs[name] for name in reports], sizes)
        self._largest = largest
        self._make_room_for_edits(_USUAL_EDITS)
        return nbytes + self._next_values.nbytes + self._reports.nbytes + self._inputs.nbytes

    def _make_room_for_edits(self, longest: int) -> None:
        self._longest_edits = longest
        self._inputs = Staging(self._gpu, self._from_host, sizes_at(self._largest, E=longest))
        self._input_blocks.append(self._inputs)  # a step in flight still reads from the last one
        self._launches.clear()

    # -- a step ------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.launch(inputs)
        return self.collect()

    def launch(self, inputs: StepInputs) -> None:
        """Asks for a step of the current shape. At most two may be in flight."""
        if len(self._in_flight) > 1:
            raise ComputeError("two steps are in flight already")
        values = {spec.name: getattr(inputs, spec.name) for spec in self._from_host}
        launch = self._prepared(values)
        self._inputs.upload(launch.inputs, values, self._turn)
        launch.call()
        if launch.count == 1 and self._runner.records:
            launch.call = self._gpu.record(launch.call) or launch.call
        launch.count += 1
        carried = self._next_values.download(self._visible_next(launch), self._turn)
        reported = self._reports.download(self._visible_reports(launch), self._turn)
        self._in_flight.append((self._gpu.mark(), carried | reported))
        self._turn = 1 - self._turn

    def collect(self) -> StepOutputs:
        """What the oldest step gave. The arrays are valid until the next launch but one."""
        mark, arrays = self._in_flight.popleft()
        self._gpu.wait(mark)
        return StepOutputs(**{name: arrays[output] for name, output in self._seen.items() if output is not None})

    def forget_launches(self) -> None:
        """Nobody will collect what was asked for: a step has failed. What is still on its way reads and writes memory that
        the next one will use, so it is waited for."""
        while self._in_flight:
            mark, _ = self._in_flight.popleft()
            self._gpu.forget(mark)
        self._gpu.finish()

    def _visible_next(self, launch: _Launch) -> dict[str, DeviceTensor]:
        names = [name for name in self._seen.values() if name is not None and _is_next(name)]
        return {name: launch.outputs[name] for name in names}

    def _visible_reports(self, launch: _Launch) -> dict[str, DeviceTensor]:
        names = [name for name in self._seen.values() if name is not None and not _is_next(name)]
        return {name: launch.outputs[name] for name in names}

    def _prepared(self, values: Mapping[str, NDArray[Any]]) -> _Launch:
        counts = {spec.name: values[spec.name].shape for spec in self._from_host}
        edits = named_sizes(self._from_host, counts).get("E", 0)
        if edits > self._longest_edits:
            self._make_room_for_edits(4 * edits)
        key = (self._shape, tuple(counts.values()))
        launch = self._launches.pop(key, None) or self._prepare(counts)
        self._launches[key] = launch
        if len(self._launches) > _MOST_LAUNCHES:
            self._launches.popitem(last=False)
        return launch

    def _prepare(self, counts: Mapping[str, tuple[int, ...]]) -> _Launch:
        sizes = sizes_at(self._shape, **named_sizes(self._from_host, counts))
        batch = self._shape.batch
        inputs = self._inputs.tensors(sizes)
        outputs = {**self._next_values.tensors(sizes), **self._reports.tensors(sizes)}
        arenas = {name: arena.tensor(batch) for name, arena in self._arenas.items()}
        caches = {next_of(spec): arenas[spec.name] for spec in self._caches}
        graph = self._runner.prepare("step", {**arenas, **inputs, **outputs, **caches}, keep=True)
        copies = [(arenas[spec.name], outputs[next_of(spec)]) for spec in self._carried]

        def call() -> None:
            graph()
            for target, source in copies:
                self._gpu.copy(target.address, source.address, source.nbytes)

        return _Launch(call, inputs, outputs)


def _is_next(name: str) -> bool:
    return name.startswith("next_")


def _output_of(field: str, outputs: Mapping[str, TensorSpec]) -> str | None:
    """The graph's name for what the host sees."""
    return next((name for name in (field, f"next_{field}") if name in outputs), None)
