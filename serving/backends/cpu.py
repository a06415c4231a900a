"""ONNX Runtime on the CPU.

Every arena is bound once per shape, by address; a cache is bound as input and output at the same address, so that
appending to it is in place. After a run only the small search tensors are carried over to the next step's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.serving.backends.arena import Layout
from beamline.serving.backends.device import sizes_of
from beamline.serving.backends.host import HostMemory, tensor_of
from beamline.serving.backends.in_place_check import refuse_copies
from beamline.serving.backends.onnxruntime_cpu import CpuGraphs, Rewrite, open_session
from beamline.serving.backends.onnxruntime_tensors import bind, read_graph
from beamline.serving.backends.shortlist import Shortlist
from beamline.serving.backends.slots import FROM_HOST, Memory, SlotBackend, next_of, sizes_at
from beamline.serving.backends.weights import Weights
from beamline.serving.contract.backend import REPORTED, Floats, Ints, Shape, Start, StepInputs, StepOutputs
from beamline.serving.contract.manifest import Manifest
from beamline.serving.contract.shortlist import load_lexicon
from beamline.serving.errors import ModelError
from beamline.serving.rewrites.blocked_topk import with_blocked_topk
from beamline.serving.rewrites.plain_step import PLAIN, with_plain_branch
from beamline.serving.rewrites.quantized import with_quantized_operators
from beamline.serving.rewrites.shortlist import WORDS, with_shortlist

_MOST_BINDINGS = 32


@dataclass(slots=True)
class _Bound:
    """A step of one shape, bound; and all that is bound, kept alive."""

    binding: ort.IOBinding
    outputs: dict[str, NDArray[Any]]
    carry: list[tuple[NDArray[Any], NDArray[Any]]]  # where an output goes, and the output
    from_host: dict[str, NDArray[Any]] = field(default_factory=dict)  # what a step was given
    given: StepInputs | None = None  # to the last step of this shape, where that was a plain one: it is here already
    listed: dict[str, NDArray[Any]] = field(default_factory=dict)  # of the shortlist

    def rest(self) -> None:
        """Steps of other shapes follow. What was given and may be large is bound anew when it is needed again."""
        self.listed = {}
        if self.given is None:
            self.from_host = {}


class CpuBackend(SlotBackend):
    def __init__(
        self, folder: Path, manifest: Manifest, threads: int, shortlist: bool = False, weights: Weights | None = None
    ) -> None:
        """`shortlist`: each request may only say what the version's lexical table has for its source. `weights`: where
        several backends share them."""
        rewrites: tuple[Rewrite, ...] = (with_quantized_operators,) if manifest.precision in ("int8", "int4") else ()
        graphs = CpuGraphs(folder, manifest, threads, rewrites, weights)
        self._lexicon = load_lexicon(folder, manifest) if shortlist else None
        self._shortlist: Shortlist | None = None
        self._rows: ort.InferenceSession | None = None  # gathers what the step graph wants of the listed words
        with graphs.weights.in_memory():
            self._session = self._open(graphs, manifest, threads)
        self._host = HostMemory()
        super().__init__(manifest, self._host, graphs)
        self._bindings: dict[Shape, _Bound] = {}
        self._last: _Bound | None = None  # that of the last step
        self._next: dict[str, NDArray[np.uint8]] = {}  # where any step leaves what the next one begins with

    def _open(self, graphs: CpuGraphs, manifest: Manifest, threads: int) -> ort.InferenceSession:
        """All but the score graph, which few use; the step graph's session."""
        if manifest.graphs.encoder is not None:
            graphs.open("encoder")
        if manifest.graphs.prefill is not None:
            graphs.open("prefill")
        model = None
        if self._lexicon is not None:
            path = graphs.path("step")
            narrow = with_shortlist(read_graph(path), manifest.vocabulary.target_size)
            self._rows = open_session(path, graphs.weights, threads, model=narrow.rows)
            model = narrow.step
        return graphs.open("step", with_blocked_topk, with_plain_branch, model=model)

    def _gather(self, words: Ints) -> dict[str, NDArray[Any]]:
        assert self._rows is not None
        names = [output.name for output in self._rows.get_outputs()]
        return dict(zip(names, self._rows.run(names, {WORDS: words}), strict=True))

    # -- slots: what a shortlist and a binding add to them -----------------------------------------------------

    def allocate(self, slots: int, largest: Shape) -> int:
        nbytes = super().allocate(slots, largest)
        self._bindings, self._last = {}, None
        room = {spec.name: slots * Layout(spec, sizes_at(largest)).slot for spec in self._carried}
        self._next = {name: np.empty(nbytes, np.uint8) for name, nbytes in room.items()}
        if self._lexicon is not None:
            self._shortlist = Shortlist(self._lexicon, self.manifest, slots, self._gather)
        self._verify_in_place()
        return nbytes

    def place(self, slot: int, memory: Memory, start: Start) -> None:
        super().place(slot, memory, start)
        if self._shortlist is not None:
            assert not isinstance(memory.source, np.ndarray)
            self._shortlist.place(slot, memory.source, start.wanted)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        if self._shortlist is not None:
            self._shortlist.move(source, target)

    # -- a step ------------------------------------------------------------------------------------------------

    def run(self, inputs: StepInputs) -> StepOutputs:
        bound = self._bound_to(self._shape)
        if anew := bound is not self._last:
            if self._last is not None:
                self._last.rest()
            self._last = bound
        listed = None if self._shortlist is None else self._shortlist.changed(self._shape.batch, anew)
        if listed is not None:
            bound.listed = listed
            for name, array in listed.items():
                bind(bound.binding.bind_input, name, tensor_of(array))
        if inputs is not bound.given:
            bound.given = None
            for name in FROM_HOST:
                self._hand_over(bound, name, getattr(inputs, name))
            self._hand_over(bound, PLAIN, np.asarray(inputs.plain))
            bound.given = inputs if inputs.plain else None
        self._session.run_with_iobinding(bound.binding)
        for target, output in bound.carry:
            target[...] = output
        out = bound.outputs
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

    def _hand_over(self, bound: _Bound, name: str, values: NDArray[Any]) -> None:
        """Most steps want what the last one wanted, in the same shape: to bind is dearer than to copy a few numbers."""
        given = bound.from_host.get(name)
        if given is not None and given.shape == values.shape:
            if values.size:
                given[...] = values
            return
        bound.from_host[name] = values.copy()
        bind(bound.binding.bind_input, name, tensor_of(bound.from_host[name]))
        if name == "report_rows":
            reported = (len(values), min(REPORTED, self.manifest.vocabulary.target_size))
            for output, dtype in (("top_log_probs", np.float32), ("top_tokens", np.int64)):
                bound.outputs[output] = np.empty(reported, dtype)
                bind(bound.binding.bind_output, output, tensor_of(bound.outputs[output]))

    def _bound_to(self, shape: Shape) -> _Bound:
        """Requests come and go, so the same few shapes recur; and the arenas stay where they are."""
        bound = self._bindings.pop(shape, None)
        if bound is None:
            if len(self._bindings) == _MOST_BINDINGS:
                del self._bindings[next(iter(self._bindings))]  # which has not been wanted for longest
            bound = self._bind(shape)
        self._bindings[shape] = bound
        return bound

    def _bind(self, shape: Shape) -> _Bound:
        """Binds every arena at this shape, which is the current one, and buffers for what a step returns."""
        binding = self._session.io_binding()
        arenas = {name: arena.tensor(shape.batch) for name, arena in self._arenas.items()}
        for name, tensor in arenas.items():
            bind(binding.bind_input, name, tensor)
        for spec in self._caches:
            bind(binding.bind_output, next_of(spec), arenas[spec.name])
        candidates = (shape.batch, shape.beams * self.manifest.candidates_per_beam)
        sizes = sizes_at(shape)
        outputs: dict[str, NDArray[Any]] = {
            next_of(spec): np.ndarray(sizes_of(spec.axes, sizes), spec.dtype, self._next[spec.name])
            for spec in self._carried
        }
        carry = [(self._host.view(arenas[spec.name]), outputs[next_of(spec)]) for spec in self._carried]
        outputs |= {
            "parents": np.empty((shape.batch, shape.beams), np.int64),
            "candidate_scores": np.empty(candidates, np.float32),
            "candidate_tokens": np.empty(candidates, np.int64),
            "candidate_parents": np.empty(candidates, np.int64),
        }
        for name, array in outputs.items():
            bind(binding.bind_output, name, tensor_of(array))
        return _Bound(binding, outputs, carry)

    def _verify_in_place(self) -> None:
        """One run on wiped slots: the runtime says so when it has to copy a cache, and then we refuse to serve."""
        self.resize(Shape(1, 1, 8, 8), 0)
        self.zero(0)
        if "source_mask" in self._arenas:
            self._host.view(self._arenas["source_mask"].tensor(1))[0, 0] = True
        none: Floats = np.zeros((1, 1, 0), np.float32)
        inputs = StepInputs(np.full(1, -1, np.int64), np.zeros((1, 1, 0), np.int64), none, none)
        refuse_copies(lambda: self.run(inputs))
        for spec in self._caches:
            if not self._host.view(self._arenas[spec.name].tensor(1))[0, :, 0].any():
                raise ModelError(f"the step graph does not write {spec.name} where it was bound")
        self.zero(0)
