"""The graphs of a version in ONNX Runtime on the CPU: how a session is opened, and runs on the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.serving.backends.device import DeviceTensor, GraphSpec, Tensors
from beamline.serving.backends.host import tensor_of
from beamline.serving.backends.onnxruntime_tensors import bind, graph_spec, read_graph
from beamline.serving.backends.weights import Weights
from beamline.serving.contract.manifest import AnyManifest, File
from beamline.serving.errors import ModelError

# What the runtime would make of a sum and the norm behind it takes three times as long as the two.
_SLOWER = ("SkipLayerNormFusion",)

Rewrite = Callable[[onnx.ModelProto], onnx.ModelProto]  # may change the graph; its weights stay outside


class CpuGraphs:
    """Each is opened when it is first asked for. `rewrites` are made of all of them, at load."""

    def __init__(
        self,
        folder: Path,
        manifest: AnyManifest,
        threads: int,
        rewrites: Sequence[Rewrite] = (),
        weights: Weights | None = None,
    ) -> None:
        """`weights`: where several share them."""
        self.max_slots: int | None = None  # as many as fit
        self.weights = weights or Weights(folder, manifest)
        self._folder = folder
        self._files: dict[str, File | None] = dict(manifest.graphs)
        self._threads = threads
        self._rewrites = tuple(rewrites)
        self._sessions: dict[str, ort.InferenceSession] = {}

    def open(self, graph: str, *rewrites: Rewrite, model: onnx.ModelProto | None = None) -> ort.InferenceSession:
        """With more rewrites, or from a model that was made of the graph."""
        session = open_session(self.path(graph), self.weights, self._threads, (*self._rewrites, *rewrites), model)
        self._sessions[graph] = session
        return session

    def path(self, graph: str) -> Path:
        file = self._files[graph]
        assert file is not None, f"this version has no {graph} graph"
        return self._folder / file.file

    def _session(self, graph: str) -> ort.InferenceSession:
        return self._sessions.get(graph) or self.open(graph)

    def spec(self, graph: str) -> GraphSpec:
        return graph_spec(self._session(graph))

    def cache_length(self, entries: int) -> int:
        return entries

    def most(self, graph: str, axis: str) -> int | None:
        return None

    def run(
        self, graph: str, feeds: Mapping[str, NDArray[Any]], bound: Mapping[str, DeviceTensor] | None = None
    ) -> tuple[Tensors, object]:
        if bound:
            self._run_bound(self._session(graph), feeds, bound)
            return {name: tensor_of(array) for name, array in feeds.items()}, feeds
        arrays = {**feeds, **self.fetch(graph, feeds, [each.name for each in self._session(graph).get_outputs()])}
        return {name: tensor_of(array) for name, array in arrays.items()}, arrays

    def _run_bound(
        self, session: ort.InferenceSession, feeds: Mapping[str, NDArray[Any]], bound: Mapping[str, DeviceTensor]
    ) -> None:
        """All outputs are bound."""
        arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()}  # alive until the run is over
        binding = session.io_binding()
        for each in session.get_inputs():
            tensor = bound[each.name] if each.name in bound else tensor_of(arrays[each.name])
            bind(binding.bind_input, each.name, tensor)
        for each in session.get_outputs():
            bind(binding.bind_output, each.name, bound[each.name])
        session.run_with_iobinding(binding)

    def fetch(self, graph: str, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        return dict(zip(names, self._session(graph).run(names, dict(feeds)), strict=True))


def open_session(
    path: Path,
    weights: Weights,
    threads: int,
    rewrites: Sequence[Rewrite] = (),
    model: onnx.ModelProto | None = None,
) -> ort.InferenceSession:
    """`model`: what was made of the graph that stands there."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 2
    # Shapes change from step to step: a plan of memory per shape would only grow.
    options.enable_mem_pattern = False
    # Encoder and step have threads of their own; those of one that still spin take the core from the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # What stays behind a DequantizeLinear must not become a product of the runtime's own, slower choice.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        model = read_graph(path) if model is None else model
        for rewrite in rewrites:
            model = rewrite(model)
        with weights.in_memory():
            weights.hand_over(model, options)
            return ort.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=list(_SLOWER),
            )
    except Exception as error:
        raise ModelError(f"{path} can't be loaded by ONNX Runtime: {error}") from error
