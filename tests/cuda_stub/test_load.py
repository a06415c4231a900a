"""Every kind of model in every precision on ONNX Runtime's CUDA provider: it loads, runs, and leaves nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.factory import make_pooled
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner
from beamline.serving.backends.placement import placement
from beamline.serving.contract.backend import PromptChunk, Shape, Start
from beamline.serving.contract.manifest import PRECISIONS, PooledManifest, read_any_manifest, read_manifest
from tests.cuda_stub.conftest import EN_DE, EN_DE_GRU, MODELS, backend_of, on_gpu
from tests.cuda_stub.test_step import no_inputs
from tests.support.cuda_stub.stub import Stub

KINDS = ("transformer", "recurrent", "language")
VERSIONS = [MODELS / kind / precision for kind in KINDS for precision in PRECISIONS] + [EN_DE, EN_DE_GRU]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: "-".join(folder.parts[-2:]))
def test_a_version_loads_runs_and_goes(folder: Path, stub: Stub) -> None:
    """Its encoder or prefill graph, steps, and scores; only arithmetic on sizes is on the CPU, or it would not load."""
    before = stub.held
    backend, manifest = backend_of(folder)
    shape = Shape(2, 4, 64, 16)
    backend.allocate(2, shape)
    backend.resize(shape, 0)
    start = Start(manifest.vocabulary.eos_ids[0], 4, independent=False)
    if manifest.graphs.prefill is None:
        memories = backend.encode([[5, 6, 7], [8, 9]])
    else:
        memories = backend.prompts([8, 5], [None, None])
        backend.take_in(memories, PromptChunk(np.ones((2, 8), np.int64), np.zeros(2, np.int64)))
    for slot, memory in enumerate(memories):
        for _ in backend.fill(slot, memory):
            pass
        backend.place(slot, memory, start)
    for _ in range(4):
        assert backend.run(no_inputs(2, 4)).tokens.shape == (2, 4)
    sources = [[5, 6]] if manifest.graphs.encoder is not None else None
    (scores,) = backend.score_batch(sources, [[1, 2, 3]], [[2, 3, 4]])
    assert scores.shape == (3,)
    assert backend.device_stats().replayed == 2  # prepared, recorded, repeated twice
    held = stub.held
    assert (held.streams, held.graphs) == (before.streams + 1, before.graphs + 1)
    del backend, memories, memory, scores
    gc.collect()
    assert stub.held == before


def test_a_classifier(stub: Stub) -> None:
    before = stub.held
    folder = MODELS / "pooled" / "mood" / "1"
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    backend = make_pooled(folder, manifest, 1, on_gpu(), 8, {})
    for _ in range(3):
        assert {len(values) for values in backend.run([[4, 5, 6], [7]]).values()} == {2}
    stub.reset()
    backend.run([[4, 5, 6], [7]])
    assert not [name for name in stub.counts() if "pageable" in name]
    del backend
    gc.collect()
    assert stub.held == before


@pytest.mark.parametrize("folder", [EN_DE, EN_DE_GRU], ids=["en-de", "en-de-gru"])
def test_what_stays_on_the_cpu_is_about_sizes(folder: Path, stub: Stub) -> None:
    gpu = CudaDevice(0)
    runner = OnnxRuntimeCudaRunner(folder, read_manifest(folder), 0, gpu.stream, owner=gpu)
    runner.spec("score")
    for name, session in runner._sessions.items():
        placed = placement(session)
        assert any(node.on_cpu for node in placed), name
        assert sum(node.on_cpu for node in placed) < len(placed) / 3
    assert set(runner._sessions) == {"encoder", "step", "score"}
