"""What a backend does with its slots, wherever they are: in the host's memory or in a GPU's.

It owns the arenas, and says what a request's slot holds when it begins, moves, is compacted and is wiped; and it runs
what is run once per request. `cpu.py` and `gpu.py` add the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.arena import Arena, Layout
from beamline.serving.backends.device import Device, DeviceTensor, Graphs, TensorSpec, aligned, check_slots
from beamline.serving.backends.padding import pad, score_feeds
from beamline.serving.backends.prefill_cache import PrefillCache, Prefix, by_parts, populate_part
from beamline.serving.contract.backend import DEAD, Floats, PromptChunk, Scored, Shape, Source, Start, StepInputs
from beamline.serving.contract.manifest import Manifest, StateKind
from beamline.serving.errors import InvalidRequest

FROM_HOST = tuple(each.name for each in fields(StepInputs))  # inputs of the step graph that the host adds
_NO_SHAPE = Shape(0, 0, 0, 0)
_FIXED = ("width", "independent")  # those that are a request's own, and stay the same


@dataclass(frozen=True, slots=True)
class Memory:
    """A row of one encoder run, `length` positions long; or of prompts that are prefilled together, `length` cache
    entries long."""

    tensors: Mapping[str, DeviceTensor]
    row: int
    length: int
    owner: object = None  # frees the tensors' memory when nobody needs it any more
    source: Source = ()  # what an encoder read
    prefill: PrefillCache | None = None  # of a prompt: has its caches, instead of `tensors`

    @property
    def entries(self) -> Mapping[str, DeviceTensor]:
        """The caches, where they are now."""
        return self.tensors if self.prefill is None else self.prefill.tensors

    def first(self, length: int) -> Prefix:
        assert self.prefill is not None
        return Prefix(self.entries, self.row, length, self.prefill.owner)


class SlotBackend:
    """All of the `Backend` protocol but `run`."""

    def __init__(self, manifest: Manifest, device: Device, graphs: Graphs) -> None:
        self.manifest = manifest
        self._device = device
        self._graphs = graphs
        self._has_prefill = manifest.graphs.prefill is not None
        self._step = graphs.spec("step")
        _check_state(manifest, self._step.inputs)
        outputs = {each.name for each in self._step.outputs}
        kinds = {tensor.name: tensor.kind for tensor in manifest.state}
        self._caches = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.CACHE]
        self._memory = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.MEMORY]
        self._recurrent = [each for each in self._step.inputs if kinds.get(each.name) is StateKind.RECURRENT]
        # What a step returns for the next one: the search's own tensors, and recurrent states.
        self._carried = [each for each in self._step.inputs if next_of(each) in outputs and each not in self._caches]
        self._fixed = [each for each in self._step.inputs if each.name in _FIXED]
        self._arenas: dict[str, Arena] = {}
        self._shape = _NO_SHAPE

    # -- slots -------------------------------------------------------------------------------------------------

    def allocate(self, slots: int, largest: Shape) -> int:
        check_slots(self._graphs, slots)
        sizes = sizes_at(largest)
        for spec in (*self._carried, *self._fixed, *self._memory, *self._caches):
            fill = np.array(DEAD) if spec.name == "scores" else None
            self._arenas[spec.name] = Arena(spec, slots, sizes, self._device, fill, masked=spec in self._caches)
        return sum(arena.nbytes for arena in self._arenas.values())

    def needed_bytes(self, slots: int, largest: Shape) -> int:
        """What `allocate` would take of the device, about."""
        sizes = sizes_at(largest)
        specs = (*self._carried, *self._fixed, *self._memory, *self._caches)
        return sum(aligned(slots * Layout(spec, sizes).slot) for spec in specs)

    def resize(self, shape: Shape, rows: int) -> bool:
        if shape == self._shape:
            return False
        relaid: list[bool] = []
        if replace(shape, batch=self._shape.batch) != self._shape:  # how many slots there are moves nothing
            self._shape = _NO_SHAPE  # until all of them are laid out: where that fails, some are
            sizes = sizes_at(shape)
            relaid = [arena.resize(sizes, rows) for arena in self._arenas.values()]
        self._shape = shape
        return any(relaid)

    def expect(self, shape: Shape) -> bool:
        caches = (self._arenas[spec.name] for spec in self._caches)
        return self._device.part is not None and populate_part(caches, sizes_at(shape), self._device.part) > 0

    def fill(self, slot: int, memory: Memory) -> Iterator[None]:
        if not self._has_prefill:
            return iter(())

        def copies() -> Iterator[int]:
            for spec in self._caches:
                yield self._arenas[spec.name].take(slot, memory.entries[spec.name], memory.row, memory.length)

        return by_parts(copies(), self._device.part)

    def place(self, slot: int, memory: Memory, start: Start) -> None:
        for spec in (*self._carried, *self._fixed, *self._memory):  # a cache's old entries are masked, and finite
            self._arenas[spec.name].clear(slot)
        beams = self._shape.beams
        scores = np.full(beams, DEAD, np.float32)
        scores[: start.width if start.samples else 1] = 0
        self._arenas["tokens"].write(slot, np.full(beams, start.token, np.int64))
        self._arenas["scores"].write(slot, scores)
        for spec in self._fixed:
            self._arenas[spec.name].write(slot, np.array([getattr(start, spec.name)], spec.dtype))
        if self._has_prefill:
            self._show_prompt(slot, memory.length)
        for spec in self._recurrent:
            if spec.name in memory.tensors:  # without an encoder they begin as zeros
                self._arenas[spec.name].spread(slot, memory.tensors[spec.name], memory.row)
        for spec in self._memory:
            arena = self._arenas[spec.name]
            length = memory.length if "S" in spec.axes else arena.layout.length
            arena.take(slot, memory.tensors[spec.name], memory.row, length)

    def _show_prompt(self, slot: int, length: int) -> None:
        """Its entries stand once, and all beams see them."""
        ancestry = np.zeros((self._shape.beams, self._shape.cache), np.bool_)
        ancestry[:, :length] = True
        self._arenas["ancestry"].write(slot, ancestry)
        for name in ("positions", "write_index"):
            self._arenas[name].write(slot, np.array([length], np.int64))

    def move(self, source: int, target: int) -> None:
        for arena in self._arenas.values():
            arena.move(source, target)

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        entries = np.asarray(keep, np.int64)
        # What stays where it is (a prompt, a common past) is not copied.
        moved = np.flatnonzero(entries != np.arange(len(entries)))
        first = int(moved[0]) if len(moved) else len(entries)
        for spec in self._caches:
            self._arenas[spec.name].keep(slot, entries, first)
        self._arenas["ancestry"].keep(slot, entries, first)
        self._arenas["write_index"].write(slot, np.array([len(keep)], np.int64))

    def zero(self, slot: int) -> None:
        for arena in self._arenas.values():
            arena.clear(slot)

    # -- graphs that are run once per request ------------------------------------------------------------------

    def encode(self, sources: Sequence[Source]) -> list[Memory]:
        if self.manifest.graphs.encoder is None:  # nor a prefill graph: there is nothing to know beforehand
            return [Memory({}, 0, 0) for _ in sources]
        rows = self._graphs.most("encoder", "B") or len(sources)
        parts = (sources[begin : begin + rows] for begin in range(0, len(sources), rows))
        return [memory for part in parts for memory in self._encode_few(part)]

    def _encode_few(self, sources: Sequence[Source]) -> list[Memory]:
        ids, mask = pad(sources, self.manifest.vocabulary.pad_id)
        tensors, owner = self._graphs.run("encoder", {"source": ids, "source_mask": mask})
        return [Memory(tensors, row, len(source), owner, source) for row, source in enumerate(sources)]

    def score(self, source: Source, target: Sequence[int], start_token: int) -> Scored:
        ids, mask = pad([source], self.manifest.vocabulary.pad_id)
        feeds: dict[str, NDArray[Any]] = {
            "source": ids,
            "source_mask": mask,
            "target": np.asarray([[start_token, *target[:-1]]], np.int64),
            "labels": np.asarray([target], np.int64),
        }
        found = self._graphs.fetch("score", feeds, ("token_log_probs", "attention"))
        return Scored(found["token_log_probs"][0], found["attention"][0])

    def score_batch(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        found: list[Floats] = []
        longest, limit = max(map(len, targets)), self._graphs.most("score", "T")
        if limit is not None and longest > limit:
            raise InvalidRequest(f"the text has {longest} tokens; on this device {limit} can be scored at most")
        rows = self._graphs.most("score", "B") or len(targets)
        for begin in range(0, len(targets), rows):
            part = slice(begin, begin + rows)
            found += self._score_few(None if sources is None else sources[part], targets[part], labels[part])
        return found

    def _score_few(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        feeds = score_feeds(sources, targets, labels, self.manifest.vocabulary.pad_id)
        log_probs = self._graphs.fetch("score", feeds, ("token_log_probs",))["token_log_probs"]
        return [row[: len(label)] for row, label in zip(log_probs, labels, strict=True)]

    # -- prompts -----------------------------------------------------------------------------------------------

    def prompts(self, lengths: Sequence[int], known: Sequence[tuple[Memory, int] | None]) -> list[Memory]:
        """As many in one cache as one run of the graph can prefill."""
        prefixes = [None if each is None else each[0].first(each[1]) for each in known]
        entries = self._graphs.cache_length(max(lengths))
        rows = self._graphs.most("prefill", "B") or len(lengths)
        memories: list[Memory] = []
        for begin in range(0, len(lengths), rows):
            part = slice(begin, begin + rows)
            cache = PrefillCache(self._caches, self._device, prefixes[part], entries)
            memories += [Memory({}, row, length, prefill=cache) for row, length in enumerate(lengths[part])]
        return memories

    def grow(self, memories: Sequence[Memory], entries: int) -> bool:
        caches = {id(memory.prefill): memory.prefill for memory in memories if memory.prefill is not None}
        return all(cache.grow(entries) for cache in caches.values())

    def take_in(self, memories: Sequence[Memory], chunk: PromptChunk) -> None:
        length = chunk.tokens.shape[1]
        most = self._graphs.most("prefill", "Q") or length
        first = 0
        for _, together in groupby(memories, key=lambda memory: id(memory.prefill)):
            rows = [memory.row for memory in together]
            part = slice(first, first := first + len(rows))
            caches = {name: _rows(tensor, rows) for name, tensor in memories[part.start].entries.items()}
            for begin in range(0, length, most):
                tokens, starts = chunk.tokens[part, begin : begin + most], chunk.starts[part] + begin
                self._prefill(caches, PromptChunk(tokens, starts))

    def _prefill(self, caches: Mapping[str, DeviceTensor], chunk: PromptChunk) -> None:
        entries = caches[self._caches[0].name].shape[2]
        # A token sees all that was before it in its prompt, and itself.
        last = chunk.starts[:, None] + np.arange(chunk.tokens.shape[1])
        visible = np.arange(entries)[None, None, :] <= last[:, :, None]
        feeds = {"tokens": chunk.tokens, "positions": chunk.starts, "write_index": chunk.starts, "visible": visible}
        self._graphs.run("prefill", feeds, {**caches, **{next_of(spec): caches[spec.name] for spec in self._caches}})

    def prefix(self, memory: Memory, length: int) -> tuple[Memory, int]:
        cache = memory.prefill
        assert cache is not None
        if _is_copied(cache, length):
            cache = PrefillCache(self._caches, self._device, [memory.first(length)], length)
            while not cache.grow(length):
                pass
        return Memory({}, 0, length, prefill=cache), cache.nbytes

    def prefix_bytes(self, memory: Memory, length: int) -> int:
        cache = memory.prefill
        assert cache is not None
        if not _is_copied(cache, length):
            return cache.nbytes
        return cache.nbytes // (cache.rows * max(1, cache.entries)) * max(1, length)


def _is_copied(cache: PrefillCache, length: int) -> bool:
    """To be kept: where others were made with it, who need not stay, or much of it is room that nobody needs any
    more."""
    return cache.rows > 1 or cache.entries > 2 * length


def sizes_at(shape: Shape, **more: int) -> dict[str, int]:
    """By the names of the axes."""
    rows = shape.batch * shape.beams
    return {"B": shape.batch, "K": shape.beams, "C": shape.cache, "S": shape.source, "R": rows, "P": rows, **more}


def next_of(spec: TensorSpec) -> str:
    """The step graph's name for a tensor's next value."""
    return f"next_{spec.name}"


def _rows(tensor: DeviceTensor, rows: Sequence[int]) -> DeviceTensor:
    """Some rows that lie together."""
    address = tensor.address + rows[0] * (tensor.nbytes // tensor.shape[0])
    return DeviceTensor(address, tensor.dtype, (len(rows), *tensor.shape[1:]))


def _check_state(manifest: Manifest, inputs: Sequence[TensorSpec]) -> None:
    """That state tensors have the fixed axes that the manifest says. One that no step reads may be missing."""
    found = {each.name: each for each in inputs}
    for tensor in manifest.state:
        spec = found.get(tensor.name)
        if spec is None:
            continue
        same = len(tensor.shape) == len(spec.axes) and all(
            wanted == axis for wanted, axis in zip(tensor.shape, spec.axes, strict=True) if isinstance(wanted, int)
        )
        if not same:
            raise ValueError(
                f"its manifest says that {tensor.name} is {list(tensor.shape)}, and its step graph {list(spec.axes)}"
            )
