"""Every kind of model in every precision on ONNX Runtime's CUDA provider: it loads, runs, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.device_weights import DeviceWeights
from beamline.serving.backends.factory import make_pooled
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner
from beamline.serving.backends.placement import placement
from beamline.serving.contract.manifest import PRECISIONS, PooledManifest, read_any_manifest, read_manifest
from tests.cuda_stub.conftest import EN_DE, EN_DE_GRU, MODELS, backend_of, on_gpu
from tests.cuda_stub.test_families import run_all_graphs
from tests.support.cuda_stub.stub import Stub

KINDS = ("transformer", "recurrent", "language")
VERSIONS = [MODELS / kind / precision for kind in KINDS for precision in PRECISIONS] + [EN_DE, EN_DE_GRU]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: "-".join(folder.parts[-2:]))
def test_a_version_loads_runs_and_goes(folder: Path, stub: Stub) -> None:
    """Its encoder or prefill graph, steps, and scores; only arithmetic on sizes is on the CPU, or it would not load."""
    before = stub.held
    backend, manifest = backend_of(folder)
    run_all_graphs(backend, manifest)
    assert backend.device_stats().replayed == 2  # prepared, recorded, repeated twice
    held = stub.held
    assert (held.streams, held.graphs) == (before.streams + 1, before.graphs + 1)
    del backend
    gc.collect()
    assert stub.held == before


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_weights_are_on_the_gpu_once(precision: str, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many graphs read them; by itself each session has a copy of its own."""
    folder = MODELS / "language" / precision
    manifest = read_manifest(folder)

    def taken() -> int:
        gpu = CudaDevice(0)
        before = stub.held.device_bytes[0]
        runner = OnnxRuntimeCudaRunner(folder, manifest, 0, gpu.stream, owner=gpu)
        runner.spec("score")
        return stub.held.device_bytes[0] - before

    once = taken()
    monkeypatch.setattr(DeviceWeights, "hand_over", lambda *arguments: None)
    gc.collect()
    each = taken()
    assert once < 1.5 * manifest.weights.bytes
    assert each > 2.5 * manifest.weights.bytes


def test_sessions_stay_until_their_last_run_is_over(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody wants the results, and the model is unloaded: no step behind it was waited for."""
    backend, _ = backend_of(EN_DE)
    assert isinstance(backend._runner, OnnxRuntimeCudaRunner)
    encoder = weakref.ref(backend._runner._sessions["encoder"])
    finish, waited = CudaDevice.finish, list[bool]()

    def note(gpu: CudaDevice) -> None:
        waited.append(encoder() is not None)
        finish(gpu)

    monkeypatch.setattr(CudaDevice, "finish", note)
    backend.encode([[5, 6, 7]])
    del backend
    assert set(waited) == {True}
    assert encoder() is None


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
