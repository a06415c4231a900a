"""ONNX Runtime on the CPU.

Every arena is bound once per shape, by address; a cache is bound as input and output at the same address, so that
appending to it is in place. After a run only the small search tensors are carried over to the next step's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.serving.backends.arena import Arena, sizes
from beamline.serving.backends.in_place import refuse_copies
from beamline.serving.backends.padding import pad, score_feeds
from beamline.serving.backends.prompt_cache import Prefix, PromptRoom, by_parts, touch_a_part
from beamline.serving.backends.session import Pass, open_session
from beamline.serving.backends.shortlist import Shortlist
from beamline.serving.contract.backend import (
    DEAD,
    REPORTED,
    Floats,
    Ints,
    PromptChunk,
    Scored,
    Shape,
    Source,
    Start,
    StepInputs,
    StepOutputs,
)
from beamline.serving.contract.manifest import Manifest, StateKind, StateTensor
from beamline.serving.contract.shortlist import load_lexicon
from beamline.serving.errors import ModelError
from beamline.serving.rewrites.plain_step import PLAIN, with_plain_branch
from beamline.serving.rewrites.quantized import in_dialect
from beamline.serving.rewrites.shortlist import WORDS, with_shortlist

# The search's own tensors: they live in slots as the model's do.
_CARRIED = (
    StateTensor(name="tokens", kind=StateKind.RECURRENT, dtype="int64", shape=("B", "K")),
    StateTensor(name="positions", kind=StateKind.RECURRENT, dtype="int64", shape=("B",)),
    StateTensor(name="write_index", kind=StateKind.RECURRENT, dtype="int64", shape=("B",)),
    StateTensor(name="scores", kind=StateKind.RECURRENT, dtype="float32", shape=("B", "K")),
    StateTensor(name="ancestry", kind=StateKind.RECURRENT, dtype="bool", shape=("B", "K", "C")),
)
_FIXED = (
    StateTensor(name="width", kind=StateKind.MEMORY, dtype="int64", shape=("B",)),
    StateTensor(name="independent", kind=StateKind.MEMORY, dtype="bool", shape=("B",)),
)
_FROM_HOST = ("forced", "edit_index", "edit_scale", "edit_add", "sample_rows", "sampling", "report_rows")


@dataclass(frozen=True, slots=True)
class _Memory:
    """Rows of one encoder run, or prompts that are taken in together; a request is one row of it, `length` source
    positions or cache entries long."""

    tensors: Mapping[str, NDArray[Any]]
    row: int
    length: int
    source: Source = ()  # what an encoder read
    room: PromptRoom | None = None  # of a prompt that is being taken in: has its caches instead

    @property
    def entries(self) -> Mapping[str, NDArray[Any]]:
        """The caches, where they are now."""
        return self.tensors if self.room is None else self.room.tensors


class OnnxRuntimeBackend:
    def __init__(self, folder: Path, manifest: Manifest, threads: int, shortlist: bool = False) -> None:
        """`shortlist`: each request may only say what the version's lexical table has for its source."""
        self.manifest = manifest
        self._folder = folder
        self._threads = threads
        self._dialect: tuple[Pass, ...] = (in_dialect,) if manifest.precision in ("int8", "int4") else ()
        encoder = manifest.graphs.encoder
        self._encoder = None if encoder is None else self._open(encoder.file)
        self._lexicon = load_lexicon(folder, manifest) if shortlist else None
        self._rows: ort.InferenceSession | None = None  # gathers what the step graph wants of the listed words
        if shortlist:
            self._step, self._rows = self._open_shortlisted()
        else:
            self._step = self._open(manifest.graphs.step.file, with_plain_branch)
        self._shortlist: Shortlist | None = None
        self._listed: dict[str, NDArray[Any]] = {}  # what is bound of the shortlist, kept alive
        self._prefill = None if manifest.graphs.prefill is None else self._open(manifest.graphs.prefill.file)
        self._score: ort.InferenceSession | None = None  # on first use
        self._arenas: dict[str, Arena] = {}
        self._shape = Shape(0, 0, 0, 0)
        self._recurrent = manifest.tensors(StateKind.RECURRENT)
        self._carried = (*_CARRIED, *self._recurrent)
        self._caches = manifest.tensors(StateKind.CACHE)
        self._memory = manifest.tensors(StateKind.MEMORY)
        self._outputs: dict[str, NDArray[Any]] = {}
        self._from_host: dict[str, NDArray[Any]] = {}  # what a step was given, and is bound to
        self._binding: ort.IOBinding | None = None

    def _open(self, file: str, *passes: Pass) -> ort.InferenceSession:
        return open_session(self._folder / file, self._threads, (*self._dialect, *passes))

    def _open_shortlisted(self) -> tuple[ort.InferenceSession, ort.InferenceSession]:
        """The step graph as wide as a shortlist, and the one that gathers what it wants of the listed words."""
        path = self._folder / self.manifest.graphs.step.file
        graphs = with_shortlist(onnx.load(path, load_external_data=False), self.manifest.vocabulary.target_size)
        step = open_session(path, self._threads, (*self._dialect, with_plain_branch), graphs.step)
        return step, open_session(path, self._threads, model=graphs.rows)

    def _gather(self, words: Ints) -> dict[str, NDArray[Any]]:
        assert self._rows is not None
        names = [output.name for output in self._rows.get_outputs()]
        return dict(zip(names, self._rows.run(names, {WORDS: words}), strict=True))

    # -- memory ------------------------------------------------------------------------------------------------

    def allocate(self, slots: int, largest: Shape) -> int:
        for tensor in (*self._carried, *_FIXED, *self._memory, *self._caches):
            fill = float(DEAD) if tensor.name == "scores" else 0
            self._arenas[tensor.name] = Arena(tensor, slots, largest, fill)
        if self._lexicon is not None:
            self._shortlist = Shortlist(self._lexicon, self.manifest, slots, self._gather)
        self._verify_in_place()
        return sum(arena.nbytes for arena in self._arenas.values())

    def resize(self, shape: Shape, rows: int) -> bool:
        if shape == self._shape:
            return False
        relaid = [arena.resize(shape, rows) for arena in self._arenas.values()]
        self._shape = shape
        self._binding = None
        return any(relaid)

    def expect(self, shape: Shape) -> bool:
        return touch_a_part((self._arenas[tensor.name] for tensor in self._caches), shape) > 0

    def fill(self, slot: int, memory: _Memory) -> Iterator[None]:
        def copies() -> Iterator[int]:
            for tensor in self._caches if self._prefill is not None else ():
                entries = memory.entries[tensor.name][memory.row, :, : memory.length]
                self._arenas[tensor.name].view[slot, :, : memory.length] = entries
                yield entries.nbytes

        return by_parts(copies())

    def place(self, slot: int, memory: _Memory, start: Start) -> None:
        for arena in self._arenas.values():
            if arena.tensor.kind is not StateKind.CACHE:  # a cache's old entries are masked, and finite
                arena.clear(slot)
        self._arenas["tokens"].view[slot] = start.token
        self._arenas["scores"].view[slot, : start.width if start.samples else 1] = 0
        self._arenas["width"].view[slot] = start.width
        self._arenas["independent"].view[slot] = start.independent
        if self._prefill is not None:
            # The prompt's entries stand once, and all beams see them.
            self._arenas["ancestry"].view[slot, :, : memory.length] = True
            self._arenas["positions"].view[slot] = memory.length
            self._arenas["write_index"].view[slot] = memory.length
        for tensor in self._recurrent:
            if tensor.name in memory.tensors:  # without an encoder they begin as zeros
                self._arenas[tensor.name].view[slot] = memory.tensors[tensor.name][memory.row]  # the same for all beams
        for tensor in self._memory:
            source = memory.tensors[tensor.name][memory.row]
            target = self._arenas[tensor.name].view[slot]
            if "S" in tensor.shape:
                cut = tuple(slice(0, memory.length) if axis == "S" else slice(None) for axis in tensor.shape[1:])
                target[cut] = source[cut]
            else:
                target[...] = source
        if self._shortlist is not None:
            assert not isinstance(memory.source, np.ndarray)
            self._shortlist.place(slot, memory.source, start.wanted)

    def move(self, source: int, target: int) -> None:
        for arena in self._arenas.values():
            arena.view[target] = arena.view[source]
        if self._shortlist is not None:
            self._shortlist.move(source, target)

    def compact(self, slot: int, keep: Sequence[int]) -> None:
        index = np.asarray(keep, np.int64)
        # What stays where it is (a prompt, a common past) is not copied.
        moved = np.flatnonzero(index != np.arange(len(index)))
        first = int(moved[0]) if len(moved) else len(index)
        for tensor in self._caches:
            row = self._arenas[tensor.name].view[slot]  # [H, C, D]
            row[:, first : len(index)] = row[:, index[first:]]
        ancestry = self._arenas["ancestry"].view[slot]  # [K, C]
        kept = ancestry[:, index]
        ancestry[...] = False
        ancestry[:, : len(index)] = kept
        self._arenas["write_index"].view[slot] = len(index)

    def zero(self, slot: int) -> None:
        for arena in self._arenas.values():
            arena.clear(slot)

    # -- graphs ------------------------------------------------------------------------------------------------

    def encode(self, sources: Sequence[Source]) -> list[_Memory]:
        if self._encoder is None:  # a decoder-only model without a prefill graph: there is nothing to know beforehand
            return [_Memory({}, 0, 0) for _ in sources]
        padded, mask = pad(sources, self.manifest.vocabulary.pad_id)
        names = [output.name for output in self._encoder.get_outputs()]
        values = self._encoder.run(names, {"source": padded, "source_mask": mask})
        tensors = dict(zip(names, values, strict=True))
        tensors["source_mask"] = mask
        return [_Memory(tensors, row, len(source), source) for row, source in enumerate(sources)]

    def run(self, inputs: StepInputs) -> StepOutputs:
        anew = self._binding is None
        binding = self._binding or self._bind()
        listed = None if self._shortlist is None else self._shortlist.changed(self._shape.batch, anew)
        if listed is not None:
            self._listed = listed
            for name, array in listed.items():
                _bind_input(binding, name, array)
        for name in _FROM_HOST:
            self._hand_over(binding, name, getattr(inputs, name))
        self._hand_over(binding, PLAIN, np.asarray(inputs.plain))
        self._step.run_with_iobinding(binding)
        rows = self._shape.batch
        for tensor in self._carried:
            self._arenas[tensor.name].view[:rows] = self._outputs[tensor.output]
        out = self._outputs
        return StepOutputs(
            tokens=out["next_tokens"],
            parents=out["parents"],
            scores=out["next_scores"],
            candidate_scores=out["candidate_scores"],
            candidate_tokens=out["candidate_tokens"],
            candidate_parents=out["candidate_parents"],
            top_log_probs=out["top_log_probs"],
            top_tokens=out["top_tokens"],
        )

    def _hand_over(self, binding: ort.IOBinding, name: str, values: NDArray[Any]) -> None:
        """Most steps want what the last one wanted, in the same shape: to bind is dearer than to copy a few numbers."""
        bound = self._from_host.get(name)
        if bound is not None and bound.shape == values.shape:
            if values.size:
                bound[...] = values
            return
        self._from_host[name] = values.copy()
        _bind_input(binding, name, self._from_host[name])
        if name == "report_rows":
            reported = (len(values), min(REPORTED, self.manifest.vocabulary.target_size))
            for output, dtype in (("top_log_probs", np.float32), ("top_tokens", np.int64)):
                self._outputs[output] = np.empty(reported, dtype)
                _bind_output(binding, output, self._outputs[output])

    def score(self, source: Source, target: Sequence[int], start_token: int) -> Scored:
        padded, mask = pad([source], self.manifest.vocabulary.pad_id)
        feeds = {
            "source": padded,
            "source_mask": mask,
            "target": np.asarray([[start_token, *target[:-1]]], np.int64),
            "labels": np.asarray([target], np.int64),
        }
        log_probs, attention = self._score_graph().run(["token_log_probs", "attention"], feeds)
        return Scored(log_probs[0], attention[0])

    def score_batch(
        self, sources: Sequence[Sequence[int]] | None, targets: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
    ) -> list[Floats]:
        feeds = score_feeds(sources, targets, labels, self.manifest.vocabulary.pad_id)
        (log_probs,) = self._score_graph().run(["token_log_probs"], feeds)
        return [row[: len(label)] for row, label in zip(log_probs, labels, strict=True)]

    def _score_graph(self) -> ort.InferenceSession:
        if self._score is None:
            self._score = self._open(self.manifest.graphs.score.file)
        return self._score

    # -- prompts -----------------------------------------------------------------------------------------------

    def prompts(self, lengths: Sequence[int], known: Sequence[_Memory | None]) -> list[_Memory]:
        prefixes = [None if each is None else Prefix(each.entries, each.row, each.length) for each in known]
        room = PromptRoom(self._caches, prefixes, max(lengths))
        return [_Memory({}, row, length, room=room) for row, length in enumerate(lengths)]

    def grow(self, memories: Sequence[_Memory], entries: int) -> bool:
        room = memories[0].room
        assert room is not None
        return room.grow(entries)

    def take_in(self, memories: Sequence[_Memory], chunk: PromptChunk) -> None:
        assert self._prefill is not None
        rows = slice(memories[0].row, memories[-1].row + 1)
        caches = [memories[0].entries[tensor.name][rows] for tensor in self._caches]
        # A token sees all that was before it in its prompt, and itself.
        last = chunk.starts[:, None] + np.arange(chunk.tokens.shape[1])
        visible = np.arange(caches[0].shape[2])[None, None, :] <= last[:, :, None]
        binding = self._prefill.io_binding()
        small = {"tokens": chunk.tokens, "positions": chunk.starts, "write_index": chunk.starts, "visible": visible}
        for name, array in small.items():
            _bind_input(binding, name, array)
        for tensor, cache in zip(self._caches, caches, strict=True):
            _bind_input(binding, tensor.name, cache)
            _bind_output(binding, tensor.output, cache)
        self._prefill.run_with_iobinding(binding)

    def prefix(self, memory: _Memory, length: int) -> tuple[_Memory, int]:
        values = memory.entries
        if any(len(tensor) > 1 for tensor in values.values()):  # others were made with it, who need not stay
            values = {name: tensor[memory.row : memory.row + 1, :, :length].copy() for name, tensor in values.items()}
        return _Memory(values, 0, length), sum(tensor.nbytes for tensor in values.values())

    def _bind(self) -> ort.IOBinding:
        """Binds every arena at the current shape, and fresh buffers for what a step returns."""
        shape = self._shape
        binding = self._step.io_binding()
        for name, arena in self._arenas.items():
            _bind_input(binding, name, arena.view[: shape.batch])
        for tensor in self._caches:
            _bind_output(binding, tensor.output, self._arenas[tensor.name].view[: shape.batch])
        candidates = (shape.batch, shape.beams * self.manifest.candidates_per_beam)
        beams = (shape.batch, shape.beams)
        self._outputs = {
            tensor.output: np.empty(sizes(tensor, shape.batch, shape), tensor.dtype) for tensor in self._carried
        }
        self._outputs |= {
            "parents": np.empty(beams, np.int64),
            "candidate_scores": np.empty(candidates, np.float32),
            "candidate_tokens": np.empty(candidates, np.int64),
            "candidate_parents": np.empty(candidates, np.int64),
        }
        for name, array in self._outputs.items():
            _bind_output(binding, name, array)
        self._from_host.clear()
        self._binding = binding
        return binding

    def _verify_in_place(self) -> None:
        """One run on wiped slots: the runtime says so when it has to copy a cache, and then we refuse to serve."""
        shape = Shape(1, 1, 8, 8)
        self.resize(shape, 0)
        self.zero(0)
        if "source_mask" in self._arenas:
            self._arenas["source_mask"].view[0, 0] = True
        none: Floats = np.zeros((1, 1, 0), np.float32)
        inputs = StepInputs(np.full(1, -1, np.int64), np.zeros((1, 1, 0), np.int64), none, none)
        refuse_copies(lambda: self.run(inputs))
        for tensor in self._caches:
            bound = self._arenas[tensor.name]
            if not bound.view[0, :, 0].any():
                raise ModelError(f"the step graph does not write {tensor.name} where it was bound")
        self.zero(0)


def _bind(bind: Callable[..., None], name: str, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)


def _bind_input(binding: ort.IOBinding, name: str, array: NDArray[Any]) -> None:
    _bind(binding.bind_input, name, array)


def _bind_output(binding: ort.IOBinding, name: str, array: NDArray[Any]) -> None:
    _bind(binding.bind_output, name, array)
