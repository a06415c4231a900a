"""Pinned memory that ONNX Runtime's sessions hold: however much they run, it stays what it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from beamline.serving.backends import onnxruntime_cuda
from beamline.serving.backends.factory import make_pooled
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.contract.backend import PromptChunk
from beamline.serving.contract.manifest import Manifest, PooledManifest, read_any_manifest
from beamline.serving.errors import ModelError
from tests.cuda_stub.conftest import MODELS, backend_of, on_gpu
from tests.cuda_stub.test_families import FAMILIES, VERSIONS, has_cells_that_cudnn_lacks, run_all_graphs
from tests.cuda_stub.test_step import no_inputs
from tests.support.cuda_stub.stub import Stub

RUNS = 5000  # ONNX Runtime takes a megabyte at once, and the smallest of our lists is half a kilobyte with its room
LANGUAGE, RECURRENT = MODELS / "language" / "float32", MODELS / "recurrent" / "float32"
STEPPING = [version for version in VERSIONS if (version / "step.onnx").exists()]
CLASSIFIER = FAMILIES / "beamline_recurrent_pooled" / "lstm" / "float32"


def grown(stub: Stub, run: Callable[[], object], runs: int = RUNS) -> int:
    for _ in range(3):
        run()
    before = stub.held.pinned_bytes
    for _ in range(runs):
        run()
    return stub.held.pinned_bytes - before


def launched(folder: Path) -> tuple[GpuBackend, Manifest]:
    """Each of its graphs has run; its steps are not recorded."""
    backend, manifest = backend_of(folder)
    backend._runner.records = False
    run_all_graphs(backend, manifest)
    return backend, manifest


def test_a_language_model_whose_heads_share_keys(stub: Stub) -> None:
    """The split of heads into those of queries and those of keys is one of unequal parts."""
    backend, _ = launched(LANGUAGE)
    chunk = PromptChunk(np.ones((2, 8), np.int64), np.zeros(2, np.int64))
    memories = backend.prompts([8, 5], [None, None])
    assert grown(stub, lambda: backend.run(no_inputs(2, 4))) == 0
    assert grown(stub, lambda: backend.take_in(memories, chunk)) == 0
    assert grown(stub, lambda: backend.score_batch(None, [[1, 2, 3]], [[2, 3, 4]])) == 0


def test_without_our_change_of_the_graph_it_grows(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what stands above can fail."""
    monkeypatch.setattr(onnxruntime_cuda, "REWRITES", ())
    backend, _ = launched(LANGUAGE)
    assert grown(stub, lambda: backend.run(no_inputs(2, 4)), 1000) > 0


def test_a_recurrent_model(stub: Stub) -> None:
    """One of its encoder's runs waits now and then, and each that is waited for anyway; a step never does."""
    backend, _ = launched(RECURRENT)
    assert grown(stub, lambda: backend.encode([[5, 6, 7], [8, 9]])) == 0
    stub.reset()
    assert grown(stub, lambda: backend.run(no_inputs(2, 4)), 1000) == 0
    assert "cudaStreamSynchronize" not in stub.counts()
    assert grown(stub, lambda: backend.score([5, 6, 7], [2, 3, 4], start_token=1)) == 0


def with_a_gru(folder: Path, target: Path) -> Path:
    """The same version, but that its step has an operator of cuDNN's."""
    shutil.copytree(folder, target)
    step = onnx.load(target / "step.onnx", load_external_data=False)
    graph = step.graph
    last = next(node for node in graph.node if "next_scores" in node.output)
    last.output[list(last.output).index("next_scores")] = "scores_before"
    values = {"gru_w": np.zeros((1, 3, 1)), "gru_r": np.zeros((1, 3, 1)), "gru_least": np.array(1e-30)}
    shapes = {"gru_rows": [1, -1, 1], "gru_axes": [0, 1, 2, 3]}
    for name, value in values.items():
        graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    for name, shape in shapes.items():
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), name))
    graph.node.extend(
        [
            helper.make_node("Reshape", ["scores", "gru_rows"], ["gru_x"]),
            helper.make_node("GRU", ["gru_x", "gru_w", "gru_r"], ["gru_y"], hidden_size=1, linear_before_reset=1),
            helper.make_node("ReduceSum", ["gru_y", "gru_axes"], ["gru_sum"], keepdims=0),
            helper.make_node("Mul", ["gru_sum", "gru_least"], ["gru_nearly_zero"]),
            helper.make_node("Add", ["scores_before", "gru_nearly_zero"], ["next_scores"]),
        ]
    )
    onnx.save(step, target / "step.onnx")
    return target


def test_a_step_with_an_operator_of_cudnn(stub: Stub, tmp_path: Path) -> None:
    """It is waited for now and then, and never recorded: a recording would read what was given back."""
    backend, manifest = backend_of(with_a_gru(LANGUAGE, tmp_path / "model"))
    run_all_graphs(backend, manifest)
    assert not backend._runner.records
    assert grown(stub, lambda: backend.run(no_inputs(2, 4))) == 0
    assert "cuStreamBeginCapture_v2" not in stub.counts()


def test_a_recurrent_classifier(stub: Stub) -> None:
    manifest = read_any_manifest(CLASSIFIER)
    assert isinstance(manifest, PooledManifest)
    backend = make_pooled(CLASSIFIER, manifest, 1, on_gpu(), 8, {})
    assert grown(stub, lambda: backend.run([[4, 5, 6], [7]])) == 0


@pytest.mark.parametrize("folder", STEPPING, ids=lambda folder: "-".join(folder.parts[-3:]))
def test_a_step_copies_nothing_to_the_gpu_but_what_we_upload(folder: Path, stub: Stub) -> None:
    """Whatever else it did would be done again by every replay, from memory that has to stay for that."""
    if has_cells_that_cudnn_lacks(folder):
        with pytest.raises(ModelError, match="to the CPU"):
            launched(folder)
        return
    backend, _ = launched(folder)
    stub.reset()
    backend.run(no_inputs(2, 4))
    counts = stub.counts()
    assert counts["copy H2D"].calls == counts["cuMemcpyHtoDAsync_v2"].calls
