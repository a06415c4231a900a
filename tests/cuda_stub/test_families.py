"""A model of every family of converters on ONNX Runtime's CUDA provider: it loads, with nothing but arithmetic on sizes
left to the CPU, and encoder or prefill, step and score run. `FULL=1` has every kind and every precision."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from beamline.serving.backends.factory import make_pooled
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.contract.backend import PromptChunk, Shape, Source, Start
from beamline.serving.contract.manifest import Manifest, PooledManifest, read_any_manifest
from beamline.serving.errors import ModelError
from tests.cuda_stub.conftest import MADE, backend_of, on_gpu
from tests.cuda_stub.test_step import no_inputs
from tests.support.cuda_stub.stub import Stub

FAMILIES = MADE / "families"
VERSIONS = sorted(path.parent for path in FAMILIES.glob("*/*/*/manifest.json"))
# What README's table lists, but for kin that share the graphs of another one.
MODEL_TYPES = {"own", "marian", "bart", "m2m_100", "t5", "gpt2", "llama", "torch_transformer", "beamline_transformer"}
MODEL_TYPES |= {"torch_recurrent", "beamline_recurrent", "recurrent_language", "encoder-decoder", "gemma2", "bloom"}
POOLED = {"torch_recurrent_pooled", "beamline_recurrent_pooled"}


def test_no_family_was_left_out() -> None:
    made: dict[str, set[str]] = {}
    for version in VERSIONS:
        made.setdefault(version.parts[-3], set()).add(version.name)
    assert set(made) >= MODEL_TYPES | POOLED
    assert all(made[each] >= {"float32", "bfloat16"} for each in MODEL_TYPES)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: "-".join(folder.parts[-3:]))
def test_it_runs_on_cuda(folder: Path, stub: Stub) -> None:
    before = stub.held
    manifest = read_any_manifest(folder)
    run = partial(_classify, folder, manifest) if isinstance(manifest, PooledManifest) else partial(_decode, folder)
    if has_cells_that_cudnn_lacks(folder):
        with pytest.raises(ModelError, match=r"would leave \d x (RNN|LSTM) \(.*\) to the CPU") as refused:
            run()
        refused.value.with_traceback(None)  # which keeps what was loaded before
        del refused
    else:
        run()
    gc.collect()
    assert stub.held == before


def has_cells_that_cudnn_lacks(folder: Path) -> bool:
    """A plain RNN with ReLU (the provider's knows tanh alone), an LSTM with peepholes or with coupled gates."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in folder.glob("*.onnx")]
    cells = [node for graph in graphs for node in graph.node if node.op_type in ("RNN", "LSTM")]
    peepholes = any(node.op_type == "LSTM" and any(node.input[7:]) for node in cells)
    attributes = [each for node in cells for each in node.attribute]
    coupled = any(each.name == "input_forget" and each.i for each in attributes)
    return peepholes or coupled or any(b"Relu" in each.strings for each in attributes)


def _classify(folder: Path, manifest: PooledManifest) -> None:
    backend = make_pooled(folder, manifest, 1, on_gpu(), 8, {})
    assert {len(values) for values in backend.run([[4, 5, 6], [7]]).values()} == {2}


def _decode(folder: Path) -> None:
    backend, manifest = backend_of(folder)
    run_all_graphs(backend, manifest)
    assert backend.device_stats().replayed == 2  # of four: prepared, recorded, repeated twice


def run_all_graphs(backend: GpuBackend, manifest: Manifest) -> None:
    """Its encoder or prefill graph, four steps of two requests, and scores."""
    shape = Shape(2, 4, 64, 16)
    backend.allocate(2, shape)
    backend.resize(shape, 0)
    start = Start(manifest.vocabulary.eos_ids[0], 4, independent=False)
    sources = _sources(manifest)
    if manifest.graphs.prefill is None:
        memories = backend.encode(sources)
    else:
        memories = backend.prompts([8, 5], [None, None])
        backend.take_in(memories, PromptChunk(np.ones((2, 8), np.int64), np.zeros(2, np.int64)))
    for slot, memory in enumerate(memories):
        for _ in backend.fill(slot, memory):
            pass
        backend.place(slot, memory, start)
    for _ in range(4):
        assert backend.run(no_inputs(2, 4)).tokens.shape == (2, 4)
    if manifest.graphs.encoder is None:
        (scores,) = backend.score_batch(None, [[1, 2, 3]], [[2, 3, 4]])
    else:
        scores = backend.score(sources[0], [2, 3, 4], start_token=1).token_log_probs
    assert scores.shape == (3,)


def _sources(manifest: Manifest) -> list[Source]:
    if not manifest.feature_width:
        return [[5, 6, 7], [8, 9]]
    return [np.ones((rows, manifest.feature_width), np.float32) for rows in (3, 2)]
