"""The backend protocol on a GPU, whatever runs the graphs there.

A step is: one upload of what the host adds, one launch, a few small copies that make its outputs the next step's
inputs, and one download of what the host wants to see. Nothing of it waits. `launch` asks for a step and `collect`
waits for the oldest one, so that the host can look at one step while the device does the next.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import Device, DeviceTensor, GraphRunner, TensorSpec, sizes_of
from beamline.serving.backends.device_arena import DeviceArena
from beamline.serving.backends.device_blocks import Block
from beamline.serving.backends.device_once import OnceRunner, check_slots, named_sizes
from beamline.serving.backends.padding import pad, score_feeds
from beamline.serving.contract.backend import (
    DEAD,
    Floats,
    PromptChunk,
    Scored,
    Shape,
    Source,
    Start,
    StepInputs,
    StepOutputs,
)
from beamline.serving.contract.manifest import Manifest, StateKind
from beamline.serving.errors import ComputeError, InvalidRequest

_MOST_LAUNCHES = 64  # kept prepared; each shape of a step is one
_USUAL_EDITS = 64  # per beam; room for longer lists is made when they come
_HOST_INPUTS = tuple(each.name for each in fields(StepInputs))
_HOST_OUTPUTS = tuple(each.name for each in fields(StepOutputs))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Rows of one encoder run that stay on the device; a request is one row, `length` positions long."""

    tensors: Mapping[str, DeviceTensor]
    row: int
    length: int
    owner: object  # frees the memory when nobody needs it any more


@dataclass(slots=True)
class _Launch:
    """A step of one shape: how to ask for it, and how often that was done."""

    call: Callable[[], None]
    inputs: Mapping[str, DeviceTensor]
    outputs: Mapping[str, DeviceTensor]
    count: int = 0


class DeviceBackend:
    def __init__(self, manifest: Manifest, device: Device, runner: GraphRunner) -> None:
        self.manifest = manifest
        self._device = device
        self._runner = runner
        self._once = OnceRunner(device, runner)
        self._step = runner.spec("step")
        outputs = {each.name: each for each in self._step.outputs}
        kinds = {tensor.name: tensor.kind for tensor in manifest.state}
        self._caches = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.CACHE]
        self._memory = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.MEMORY]
        self._recurrent = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.RECURRENT]
        # What a step returns for the next one, and what a request brings along and keeps.
        self._carried = [each for each in self._step.inputs if _next(each) in outputs and each not in self._caches]
        known = {each.name for each in (*self._caches, *self._memory, *self._carried)}
        self._from_host = [each for each in self._step.inputs if each.name in _HOST_INPUTS]
        self._fixed = [each for each in self._step.inputs if each.name not in known and each.name not in _HOST_INPUTS]
        self._seen = {name: _output_of(name, outputs) for name in _HOST_OUTPUTS}
        self._arenas: dict[str, DeviceArena] = {}
        self._shape = Shape(0, 0, 0, 0)
        self._launches: OrderedDict[object, _Launch] = OrderedDict()
        self._flights: deque[tuple[Any, dict[str, NDArray[Any]]]] = deque()
        self._turn = 0
        self._rooms: list[Block] = []

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, slots: int, largest: Shape) -> int:
        check_slots(self._runner, slots)
        sizes = self._sizes(largest)
        for spec in (*self._carried, *self._fixed, *self._memory, *self._caches):
            fill = DEAD if spec.name == "scores" else None
            self._arenas[spec.name] = DeviceArena(
                spec, slots, sizes, self._device, None if fill is None else np.array(fill)
            )
        outputs = {each.name: each for each in self._step.outputs}
        # What the host sees comes first: only that part is brought over.
        carried = sorted((_next(each) for each in self._carried), key=lambda name: name not in self._seen.values())
        self._next_values = Block(self._device, [outputs[name] for name in carried], sizes)
        reports = [name for name in self._seen.values() if name is not None and not _is_next(name)]
        self._reports = Block(self._device, [outputs[name] for name in reports], sizes)
        self._largest = largest
        self._make_room_for_edits(_USUAL_EDITS)
        self._scratch_bytes = max(arena.nbytes for arena in self._arenas.values())
        self._scratch = self._device.allocate(self._scratch_bytes)
        blocks = self._next_values.nbytes + self._reports.nbytes + self._inputs.nbytes
        return sum(arena.nbytes for arena in self._arenas.values()) + blocks + self._scratch_bytes

    @staticmethod
    def _sizes(shape: Shape, **more: int) -> dict[str, int]:
        sizes = {"B": shape.batch, "K": shape.beams, "C": shape.cache, "S": shape.source}
        rows = shape.batch * shape.beams
        return {**sizes, "R": rows, "P": rows, **more}

    def _make_room_for_edits(self, longest: int) -> None:
        self._longest_edits = longest
        self._inputs = Block(self._device, self._from_host, self._sizes(self._largest, E=longest))
        self._rooms.append(self._inputs)  # a step that is on its way still reads from the last one
        self._launches.clear()

    def resize(self, shape: Shape, rows: int) -> bool:
        if shape == self._shape:
            return False
        sizes = self._sizes(shape)
        relaid = [arena.resize(sizes, rows, self._scratch) for arena in self._arenas.values()]
        self._shape = shape
        return any(relaid)

    def expect(self, shape: Shape) -> bool:
        """All memory is the device's from the beginning."""
        return False

    def fill(self, slot: int, memory: DeviceMemory) -> Iterator[None]:
        """In one part: the device copies while the host goes on."""
        for spec in self._caches if self.manifest.graphs.prefill is not None else ():
            self._arenas[spec.name].take(slot, memory.tensors[spec.name], memory.row, memory.length)
        return iter(())

    def place(self, slot: int, memory: DeviceMemory, start: Start) -> None:
        for arena in self._arenas.values():
            if arena.spec not in self._caches:  # a cache's old entries are masked, and finite
                arena.clear(slot)
        beams = self._shape.beams
        scores = np.full(beams, DEAD, np.float32)
        scores[: start.width if start.samples else 1] = 0
        self._arenas["tokens"].write(slot, np.full(beams, start.token, np.int64))
        self._arenas["scores"].write(slot, scores)
        for spec in self._fixed:
            self._arenas[spec.name].write(slot, np.array([getattr(start, spec.name)], spec.dtype))
        if self.manifest.graphs.prefill is not None:
            self._place_prompt(slot, memory)
        for spec in self._recurrent:
            if spec.name in memory.tensors:  # without an encoder they begin as zeros
                self._arenas[spec.name].spread(slot, memory.tensors[spec.name], memory.row)
        for spec in self._memory:
            length = memory.length if "S" in spec.axes else self._arenas[spec.name].layout.length
            self._arenas[spec.name].take(slot, memory.tensors[spec.name], memory.row, length)

    def _place_prompt(self, slot: int, memory: DeviceMemory) -> None:
        """Its entries stand once, and all beams see them."""
        ancestry = np.zeros((self._shape.beams, self._shape.cache), np.bool_)
        ancestry[:, : memory.length] = True
        self._arenas["ancestry"].write(slot, ancestry)
        for name in ("positions", "write_index"):
            self._arenas[name].write(slot, np.array([memory.length], np.int64))

    def move(self, source: int, target: int) -> None:
        for arena in self._arenas.values():
            arena.move(source, target)

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        for spec in self._caches:
            self._arenas[spec.name].keep(slot, keep, self._scratch, clear_rest=False)
        self._arenas["ancestry"].keep(slot, keep, self._scratch, clear_rest=True)
        self._arenas["write_index"].write(slot, np.array([len(keep)], np.int64))

    def zero(self, slot: int) -> None:
        for arena in self._arenas.values():
            arena.clear(slot)

    # -- a step ------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.launch(inputs)
        return self.collect()

    def launch(self, inputs: StepInputs) -> None:
        """Asks for a step of the current shape. At most two may be on their way."""
        if len(self._flights) > 1:
            raise ComputeError("two steps are on their way already")
        values = {spec.name: getattr(inputs, spec.name) for spec in self._from_host}
        launch = self._prepared(values)
        self._inputs.upload(launch.inputs, values, self._turn)
        launch.call()
        if launch.count == 1 and self._runner.records:
            launch.call = self._device.record(launch.call) or launch.call
        launch.count += 1
        carried = self._next_values.download(self._visible_next(launch), self._turn)
        reported = self._reports.download(self._visible_reports(launch), self._turn)
        self._flights.append((self._device.mark(), carried | reported))
        self._turn = 1 - self._turn

    def collect(self) -> StepOutputs:
        """What the oldest step gave. The arrays are valid until the next launch but one."""
        mark, arrays = self._flights.popleft()
        self._device.wait(mark)
        return StepOutputs(**{name: arrays[output] for name, output in self._seen.items() if output is not None})

    def forget_launches(self) -> None:
        """Nobody will collect what was asked for: a step has failed."""
        self._flights.clear()

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
        sizes = self._sizes(self._shape, **named_sizes(self._from_host, counts))
        batch = self._shape.batch
        inputs = self._inputs.tensors(sizes)
        outputs = {**self._next_values.tensors(sizes), **self._reports.tensors(sizes)}
        arenas = {name: arena.tensor(batch) for name, arena in self._arenas.items()}
        caches = {_next(spec): arenas[spec.name] for spec in self._caches}
        graph = self._runner.prepare("step", {**arenas, **inputs, **outputs, **caches}, keep=True)
        copies = [(arenas[spec.name], outputs[_next(spec)]) for spec in self._carried]

        def call() -> None:
            graph()
            for target, source in copies:
                self._device.copy(target.address, source.address, source.nbytes)

        return _Launch(call, inputs, outputs)

    # -- the other graphs --------------------------------------------------------------------------------------

    def encode(self, sources: Sequence[Source]) -> list[DeviceMemory]:
        if self.manifest.graphs.encoder is None:
            nothing = DeviceMemory({}, 0, 0, None)
            return [nothing for _ in sources]
        ids, mask = pad(sources, self.manifest.vocabulary.pad_id)
        tensors, owner = self._once.run("encoder", {"source": ids, "source_mask": mask})
        return [DeviceMemory(tensors, row, len(source), owner) for row, source in enumerate(sources)]

    def score(self, source: Source, target: Sequence[int], start_token: int) -> Scored:
        ids, mask = pad([source], self.manifest.vocabulary.pad_id)
        feeds: dict[str, NDArray[Any]] = {
            "source": ids,
            "source_mask": mask,
            "target": np.asarray([[start_token, *target[:-1]]], np.int64),
            "labels": np.asarray([target], np.int64),
        }
        found = self._once.fetch("score", feeds, ("token_log_probs", "attention"))
        return Scored(found["token_log_probs"][0], found["attention"][0])

    def score_batch(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        found: list[Floats] = []
        longest, limit = max(map(len, targets)), self._runner.most("score", "T")
        if limit is not None and longest > limit:
            raise InvalidRequest(f"the text has {longest} tokens; on this device {limit} can be scored at most")
        rows = self._runner.most("score", "B") or len(targets)
        for begin in range(0, len(targets), rows):
            part = slice(begin, begin + rows)
            found += self._score_few(None if sources is None else sources[part], targets[part], labels[part])
        return found

    def _score_few(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        feeds = score_feeds(sources, targets, labels, self.manifest.vocabulary.pad_id)
        log_probs = self._once.fetch("score", feeds, ("token_log_probs",))["token_log_probs"]
        return [row[: len(label)] for row, label in zip(log_probs, labels, strict=True)]

    # -- prompts -----------------------------------------------------------------------------------------------

    def prompts(self, lengths: Sequence[int], known: Sequence[DeviceMemory | None]) -> list[DeviceMemory]:
        """As many in one piece of memory as one run takes in."""
        entries = self._runner.cache_length(max(lengths))
        rows = self._runner.most("prefill", "B") or len(lengths)
        memories: list[DeviceMemory] = []
        for begin in range(0, len(lengths), rows):
            part = lengths[begin : begin + rows]
            tensors, owner = self._cache_rows(len(part), entries)
            for row, prefix in enumerate(known[begin : begin + rows]):
                if prefix is not None:
                    self._copy_entries(tensors, row, prefix, prefix.length)
            memories += [DeviceMemory(tensors, row, length, owner) for row, length in enumerate(part)]
        return memories

    def grow(self, memories: Sequence[DeviceMemory], entries: int) -> bool:
        """A prompt's room is as large as it will ever need."""
        return True

    def take_in(self, memories: Sequence[DeviceMemory], chunk: PromptChunk) -> None:
        length = chunk.tokens.shape[1]
        most = self._runner.most("prefill", "Q") or length
        first = 0
        for _, piece in groupby(memories, key=lambda memory: id(memory.owner)):  # those that lie in one piece
            rows = [memory.row for memory in piece]
            part = slice(first, first := first + len(rows))
            tensors = {name: _rows(tensor, rows) for name, tensor in memories[part.start].tensors.items()}
            for begin in range(0, length, most):
                tokens, starts = chunk.tokens[part, begin : begin + most], chunk.starts[part] + begin
                self._take_in(tensors, PromptChunk(tokens, starts))

    def _take_in(self, tensors: Mapping[str, DeviceTensor], chunk: PromptChunk) -> None:
        entries = tensors[self._caches[0].name].shape[2]
        # A token sees all that was before it in its prompt, and itself.
        last = chunk.starts[:, None] + np.arange(chunk.tokens.shape[1])
        visible = np.arange(entries)[None, None, :] <= last[:, :, None]
        feeds = {"tokens": chunk.tokens, "positions": chunk.starts, "write_index": chunk.starts, "visible": visible}
        bound = {**tensors, **{_next(spec): tensors[spec.name] for spec in self._caches}}
        self._once.run("prefill", feeds, bound)

    def prefix(self, memory: DeviceMemory, length: int) -> tuple[DeviceMemory, int]:
        tensors, owner = self._cache_rows(1, length)
        self._copy_entries(tensors, 0, memory, length)
        return DeviceMemory(tensors, 0, length, owner), sum(tensor.nbytes for tensor in tensors.values())

    def _cache_rows(self, rows: int, entries: int) -> tuple[dict[str, DeviceTensor], object]:
        """Room for the caches of some prompts, zeroed."""
        shapes = {spec.name: (spec.dtype, sizes_of(spec.axes, {"B": rows, "C": entries})) for spec in self._caches}
        return self._once.memory_for(shapes)

    def _copy_entries(self, tensors: Mapping[str, DeviceTensor], row: int, source: DeviceMemory, length: int) -> None:
        """The first entries of one memory's caches."""
        for spec in self._caches:
            mine, theirs = tensors[spec.name], source.tensors[spec.name]
            heads = mine.shape[1]
            pitches = (mine.nbytes // mine.shape[0] // heads, theirs.nbytes // theirs.shape[0] // heads)
            nbytes = pitches[0] // mine.shape[2] * length
            target, origin = mine.address + row * heads * pitches[0], theirs.address + source.row * heads * pitches[1]
            self._device.copy(target, origin, nbytes, heads, pitches)


def _rows(tensor: DeviceTensor, rows: Sequence[int]) -> DeviceTensor:
    """Some rows that lie together."""
    address = tensor.address + rows[0] * (tensor.nbytes // tensor.shape[0])
    return DeviceTensor(address, tensor.dtype, (len(rows), *tensor.shape[1:]))


def _next(spec: TensorSpec) -> str:
    return f"next_{spec.name}"


def _is_next(name: str) -> bool:
    return name.startswith("next_")


def _output_of(field: str, outputs: Mapping[str, TensorSpec]) -> str | None:
    """The graph's name for what the host sees."""
    return next((name for name in (field, f"next_{field}") if name in outputs), None)
