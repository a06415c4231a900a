"""ONNX Runtime on the CPU.

Every arena is bound once per shape, by address; a cache is bound as input and output at the same address, so that
appending to it is in place. After a run only the small search tensors are carried over to the next step's inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

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
        self._listed: dict[str, NDArray[Any]] = {}  # what is bound of the shortlist, kept alive
        self._rows: ort.InferenceSession | None = None  # gathers what the step graph wants of the listed words
        with graphs.weights.in_memory():
            self._session = self._open(graphs, manifest, threads)
        self._host = HostMemory()
        super().__init__(manifest, self._host, graphs)
        self._outputs: dict[str, NDArray[Any]] = {}
        self._carry: list[tuple[NDArray[Any], NDArray[Any]]] = []  # where an output goes, and the output
        self._from_host: dict[str, NDArray[Any]] = {}  # what a step was given, and is bound to
        self._binding: ort.IOBinding | None = None

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
        if self._lexicon is not None:
            self._shortlist = Shortlist(self._lexicon, self.manifest, slots, self._gather)
        self._verify_in_place()
        return nbytes

    def resize(self, shape: Shape, rows: int) -> bool:
        if shape != self._shape:
            self._binding = None
        return super().resize(shape, rows)

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
        anew = self._binding is None
        binding = self._binding or self._bind()
        listed = None if self._shortlist is None else self._shortlist.changed(self._shape.batch, anew)
        if listed is not None:
            self._listed = listed
            for name, array in listed.items():
                bind(binding.bind_input, name, tensor_of(array))
        for name in FROM_HOST:
            self._hand_over(binding, name, getattr(inputs, name))
        self._hand_over(binding, PLAIN, np.asarray(inputs.plain))
        self._session.run_with_iobinding(binding)
        for target, output in self._carry:
            target[...] = output
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
        bind(binding.bind_input, name, tensor_of(self._from_host[name]))
        if name == "report_rows":
            reported = (len(values), min(REPORTED, self.manifest.vocabulary.target_size))
            for output, dtype in (("top_log_probs", np.float32), ("top_tokens", np.int64)):
                self._outputs[output] = np.empty(reported, dtype)
                bind(binding.bind_output, output, tensor_of(self._outputs[output]))

    def _bind(self) -> ort.IOBinding:
        """Binds every arena at the current shape, and fresh buffers for what a step returns."""
        shape = self._shape
        binding = self._session.io_binding()
        arenas = {name: arena.tensor(shape.batch) for name, arena in self._arenas.items()}
        for name, tensor in arenas.items():
            bind(binding.bind_input, name, tensor)
        for spec in self._caches:
            bind(binding.bind_output, next_of(spec), arenas[spec.name])
        candidates = (shape.batch, shape.beams * self.manifest.candidates_per_beam)
        sizes = sizes_at(shape)
        self._outputs = {next_of(spec): np.empty(sizes_of(spec.axes, sizes), spec.dtype) for spec in self._carried}
        self._carry = [(self._host.view(arenas[spec.name]), self._outputs[next_of(spec)]) for spec in self._carried]
        self._outputs |= {
            "parents": np.empty((shape.batch, shape.beams), np.int64),
            "candidate_scores": np.empty(candidates, np.float32),
            "candidate_tokens": np.empty(candidates, np.int64),
            "candidate_parents": np.empty(candidates, np.int64),
        }
        for name, array in self._outputs.items():
            bind(binding.bind_output, name, tensor_of(array))
        self._from_host.clear()
        self._binding = binding
        return binding

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
