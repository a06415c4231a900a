"""The backend on a GPU, whatever runs the graphs there.

A step is: one upload of what the host adds, one launch, a few small copies that make its outputs the next step's
inputs, and one download of what the host wants to see. Nothing of it waits. `launch` asks for a step and `collect`
waits for the oldest one, so that the host can look at one step while the device does the next.

Requests come and go, so hardly two steps would have the same shape. Where launches can be recorded, they are padded to
a few sizes, so that the same ones recur: idle rows compute what the first row does, into entries that nobody sees.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.chunk_timer import ChunkTimer
from beamline.serving.backends.device import SCRATCH_BYTES, DeviceTensor, Gpu, GraphRunner, TensorSpec, named_sizes
from beamline.serving.backends.one_shot import GpuGraphs
from beamline.serving.backends.padding import padded_count, padded_step
from beamline.serving.backends.slots import FROM_HOST, Memory, SlotBackend, next_of, sizes_at
from beamline.serving.backends.staging import Staging
from beamline.serving.contract.backend import DeviceTimes, PromptChunk, Shape, Start, StepInputs, StepOutputs
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.stats import DeviceStats
from beamline.serving.errors import ComputeError, OutOfMemory

_MOST_LAUNCHES = 64  # kept prepared; each shape of a step is one
_USUAL_EDITS = 64  # per beam of all slots; room for longer lists is made when they come
_ARRAYS_OF_SCORES = 3  # that a step has at once
_TIGHT_STEPS = 256  # that are not padded, after one for which there was too little memory
_SHORT_LISTS = 256  # steps without longer ones, after which that room is given back
_HOST_OUTPUTS = tuple(each.name for each in fields(StepOutputs))


@dataclass(slots=True)
class _Launch:
    """A step of one shape: how to ask for it, and how often that was done."""

    call: Callable[[], None]
    inputs: Mapping[str, DeviceTensor]
    outputs: Mapping[str, DeviceTensor]
    prepared: Callable[[], None]  # what `call` is, or a recording of: that points into memory which goes with this one
    kept: bool  # so it may be recorded
    count: int = 0
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """One that is in flight. Of the arrays, only the first rows are a request's. The launch must not go before its work
    is done, also where it is not kept any more: its execution context goes with it."""

    begin: Any
    mark: Any
    arrays: Mapping[str, NDArray[Any]]
    batch: int
    reported: int
    launch: _Launch
    chunks: int  # of prompts, that were asked for before it


_Asked = tuple[dict[str, NDArray[Any]], int, _Launch]


class GpuBackend(SlotBackend):
    def __init__(self, manifest: Manifest, device: Gpu, runner: GraphRunner) -> None:
        super().__init__(manifest, device, GpuGraphs(device, runner))
        self._gpu = device
        self._runner = runner
        self._from_host = [each for each in self._step.inputs if each.name in FROM_HOST]
        outputs = {each.name: each for each in self._step.outputs}
        self._seen = {name: _output_of(name, outputs) for name in _HOST_OUTPUTS}
        self._launches: OrderedDict[object, _Launch] = OrderedDict()
        self._in_flight: deque[_Step] = deque()
        self._turn = 0
        self._tight = 0  # so many steps more are not padded
        self._idle: set[int] = set()  # slots that nobody has and that may be computed with, as they are laid out
        self._steps = self._replayed = 0
        self._seconds = 0.0  # of the device, in steps
        self._step_seconds = 0.0  # in the one that was collected last
        self._chunk_timer = ChunkTimer(device)
        weakref.finalize(self, _let_go, device, self._in_flight, self._launches).atexit = False

    def allocate(self, slots: int, largest: Shape) -> int:
        nbytes = super().allocate(slots, largest)
        sizes = sizes_at(largest)
        outputs = {each.name: each for each in self._step.outputs}
        # What the host sees comes first: only that part is brought over.
        carried = sorted((next_of(each) for each in self._carried), key=lambda name: name not in self._seen.values())
        reports = [name for name in self._seen.values() if name is not None and not _is_next(name)]
        nexts, reported = [outputs[name] for name in carried], [outputs[name] for name in reports]
        self._next_values = Staging(self._gpu, nexts, Staging.bytes_for(nexts, sizes))
        self._reports = Staging(self._gpu, reported, Staging.bytes_for(reported, sizes))
        self._usual_inputs = Staging.bytes_for(self._from_host, sizes_at(largest, E=_USUAL_EDITS))
        self._slots = slots
        self._make_room(self._usual_inputs)
        # So that no change of layout ever needs more than there is.
        self._gpu.reserve(max(arena.scratch_bytes for arena in self._arenas.values()), 8 * largest.cache)
        return nbytes + self._next_values.nbytes + self._reports.nbytes + self._inputs.nbytes

    def needed_bytes(self, slots: int, largest: Shape) -> int:
        """With what the host adds and sees, scratch memory, and what a step computes in between: a few arrays of scores
        for all words."""
        sizes = sizes_at(largest, E=_USUAL_EDITS)
        arenas = super().needed_bytes(slots, largest)
        staged = Staging.bytes_for((*self._from_host, *self._step.outputs[: len(self._carried)]), sizes)
        words = 4 * slots * largest.beams * self.manifest.vocabulary.target_size
        return arenas + 2 * staged + min(arenas, SCRATCH_BYTES) + _ARRAYS_OF_SCORES * words

    def _make_room(self, nbytes: int) -> None:
        """For what the host adds. A step in flight still reads from the old room: it is freed behind that. And it keeps
        its own launch until it is over."""
        self._inputs = Staging(self._gpu, self._from_host, nbytes)
        self._launches.clear()
        self._since_long = 0

    def place(self, slot: int, memory: Memory, start: Start) -> None:
        self._idle.discard(slot)
        super().place(slot, memory, start)

    def move(self, source: int, target: int) -> None:
        self._idle.discard(target)
        super().move(source, target)

    def resize(self, shape: Shape, rows: int) -> bool:
        if replace(shape, batch=self._shape.batch) != self._shape:
            self._idle.clear()  # only slots that somebody has are laid out anew
        return super().resize(shape, rows)

    def zero(self, slot: int) -> None:
        """With what idle rows made of it: they compute what the first row does, and NaN is NaN behind a mask, too."""
        super().zero(slot)
        for idle in self._idle:
            for spec in self._caches:
                self._arenas[spec.name].clear_last(idle, self._shape.beams)
        self._idle.clear()

    def take_in(self, memories: Sequence[Memory], chunk: PromptChunk) -> None:
        with self._chunk_timer.measure(chunk.tokens.size):
            super().take_in(memories, chunk)

    # -- a step ------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.launch(inputs)
        return self.collect()

    def launch(self, inputs: StepInputs) -> None:
        """Asks for a step of the current shape. At most two may be in flight."""
        if len(self._in_flight) > 1:
            raise ComputeError("two steps are in flight already")
        begin = self._gpu.mark(timed=True)
        try:
            arrays, reported, launch = self._ask_for_what_fits(inputs)
            end = self._gpu.mark(timed=True)
        except BaseException:
            self._gpu.forget(begin)
            self._turn = 1 - self._turn  # what it has uploaded may still be on its way
            raise
        chunks = self._chunk_timer.asked
        self._in_flight.append(_Step(begin, end, arrays, self._shape.batch, reported, launch, chunks))
        self._turn = 1 - self._turn

    def _ask_for_what_fits(self, inputs: StepInputs) -> _Asked:
        """Idle rows and recordings take memory, too: for a while nothing is padded where there is too little. And what
        our pool keeps is not ONNX Runtime's to take before it is given back."""
        try:
            return self._ask_for(inputs)
        except OutOfMemory:
            if self._in_flight:
                raise
        self._gpu.trim()
        self._tight = _TIGHT_STEPS
        self._turn = 1 - self._turn  # what was uploaded may still be on its way
        return self._ask_for(inputs)

    def _ask_for(self, inputs: StepInputs) -> _Asked:
        """The arrays that its results will be in, how many rows of reports there are, and what was launched."""
        batch, reported = self._shape.batch, len(inputs.report_rows)
        if self._tight:
            self._tight -= 1
        elif self._runner.records:
            inputs = padded_step(inputs, padded_count(batch, self._slots))
            self._idle_up_to(len(inputs.forced))
        values = {spec.name: getattr(inputs, spec.name) for spec in self._from_host}
        launch = self._prepared(values, len(inputs.forced))
        self._inputs.upload(launch.inputs, values, self._turn)
        if self._tight:
            launch.call, launch.recorded, launch.count = launch.prepared, False, 0
        launch.call()
        self._steps += 1
        self._replayed += launch.recorded
        self._carry(launch, batch)
        # When it recurs; and again, ever less often, where that could not be done: a model was being loaded, say.
        recurs = launch.count.bit_count() == 1 and not launch.recorded
        if recurs and launch.kept and self._runner.records and not self._tight:
            recording = self._gpu.record(launch.call)
            launch.call, launch.recorded = recording or launch.call, recording is not None
        launch.count += 1
        carried = self._next_values.download(self._visible(launch, of_next=True), self._turn)
        reports = self._reports.download(self._visible(launch, of_next=False), self._turn)
        return carried | reports, reported, launch

    def _carry(self, launch: _Launch, batch: int) -> None:
        """Outputs become the next step's inputs, for the rows that are requests."""
        for spec in self._carried:
            source = launch.outputs[next_of(spec)]
            nbytes = batch * (source.nbytes // source.shape[0])
            self._gpu.copy(self._arenas[spec.name].address, source.address, nbytes)

    def collect(self) -> StepOutputs:
        """What the oldest step gave. The arrays are valid until the next launch but one; one that failed counts."""
        step = self._in_flight.popleft()
        try:
            self._gpu.wait(step.mark)
            self._step_seconds = self._gpu.seconds(step.begin, step.mark)
            self._seconds += self._step_seconds
            self._chunk_timer.reached(step.chunks)
        finally:
            self._gpu.forget(step.begin)
        found = {}
        for name, output in self._seen.items():
            if output is not None:
                rows = step.reported if name.startswith("top_") else step.batch
                found[name] = step.arrays[output][:rows]
        return StepOutputs(**found)

    def forget_launches(self) -> None:
        """Nobody will collect what was asked for: a step has failed. What is still on its way reads and writes memory
        that the next one will use, so it is waited for."""
        steps = list(self._in_flight)  # with their launches, until they are over
        self._in_flight.clear()
        for step in steps:
            self._gpu.forget(step.begin)
            self._gpu.forget(step.mark)
        self._gpu.finish()

    def device_times(self) -> DeviceTimes:
        return DeviceTimes(self._step_seconds, self._chunk_timer.take())

    def device_stats(self) -> DeviceStats:
        memory = self._gpu.memory()
        return DeviceStats(
            memory.used,
            memory.reserved,
            memory.free,
            self._steps,
            self._replayed,
            self._seconds,
            self._gpu.copies,
            self._gpu.copied_bytes,
            self._gpu.waits,
        )

    def _visible(self, launch: _Launch, of_next: bool) -> dict[str, DeviceTensor]:
        names = [name for name in self._seen.values() if name is not None and _is_next(name) == of_next]
        return {name: launch.outputs[name] for name in names}

    def _prepared(self, values: Mapping[str, NDArray[Any]], batch: int) -> _Launch:
        counts = {spec.name: values[spec.name].shape for spec in self._from_host}
        shape = Shape(batch, self._shape.beams, self._shape.cache, self._shape.source)
        sizes = sizes_at(shape, **named_sizes(self._from_host, counts))
        self._fit_inputs(Staging.bytes_for(self._from_host, sizes))
        key = (shape, tuple(counts.values()))
        launch = self._launches.pop(key, None) or self._prepare(batch, sizes, keep=not self._runner.own_contexts)
        if launch.count == 1 and not launch.kept:  # it recurs
            with suppress(OutOfMemory):  # then it goes on as it began
                launch = self._prepare(batch, sizes, keep=True)
        self._launches[key] = launch
        if len(self._launches) > _MOST_LAUNCHES:
            self._launches.popitem(last=False)
        return launch

    def _fit_inputs(self, nbytes: int) -> None:
        """Room for long lists of edits is made when they come, and given back when none has come for a while."""
        if nbytes > self._inputs.nbytes:
            self._make_room(1 << (nbytes - 1).bit_length())
        elif nbytes > self._usual_inputs:
            self._since_long = 0
        elif self._inputs.nbytes > 2 * self._usual_inputs:
            self._since_long += 1
            if self._since_long >= _SHORT_LISTS:
                self._make_room(self._usual_inputs)

    def _prepare(self, batch: int, sizes: Mapping[str, int], keep: bool) -> _Launch:
        inputs = self._inputs.tensors(sizes)
        outputs = {**self._next_values.tensors(sizes), **self._reports.tensors(sizes)}
        arenas = {name: arena.tensor(batch) for name, arena in self._arenas.items()}
        caches = {next_of(spec): arenas[spec.name] for spec in self._caches}
        tensors = {**arenas, **inputs, **outputs, **caches}
        while True:
            try:
                call = self._runner.prepare("step", tensors, keep)
            except OutOfMemory:
                if not self._drop_oldest():
                    raise
            else:
                return _Launch(call, inputs, outputs, call, keep)

    def _drop_oldest(self) -> bool:
        """Of the launches that are kept, for the memory of its context; none of a step in flight, whose it still is."""
        for key, launch in self._launches.items():
            if launch.kept and all(step.launch is not launch for step in self._in_flight):
                del self._launches[key]
                return True
        return False

    def _idle_up_to(self, rows: int) -> None:
        """Rows behind the requests' compute what the first does: numbers, whatever is in memory. What they add to their
        caches lies at the end, where nobody's entries are: not even those of a prompt that waits there for its turn."""
        shape = self._shape
        for slot in range(shape.batch, rows):
            if slot in self._idle:
                continue
            for spec in (*self._carried, *self._fixed, *self._memory):
                self._arenas[spec.name].move(0, slot)
            if "write_index" in self._arenas:
                self._arenas["write_index"].write(slot, np.array([shape.cache - shape.beams], np.int64))
            self._idle.add(slot)
        self._idle.difference_update(range(shape.batch))


def _let_go(device: Gpu, *launches: MutableSequence[_Step] | MutableMapping[object, _Launch]) -> None:
    """Before what they were made of: sessions, and plans."""
    device.drain()
    for each in launches:
        each.clear()


def _is_next(name: str) -> bool:
    return name.startswith("next_")


def _output_of(field: str, outputs: Mapping[str, TensorSpec]) -> str | None:
    """The graph's name for what the host sees."""
    return next((name for name in (field, f"next_{field}") if name in outputs), None)
