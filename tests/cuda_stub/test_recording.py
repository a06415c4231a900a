"""What else happens on a GPU while a step is recorded there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from beamline.serving.backends import onnxruntime_cuda
from beamline.serving.backends.capture_gate import gate_of
from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.onnxruntime_tensors import read_graph
from tests.cuda_stub.conftest import EN_DE, MODELS, backend_of
from tests.cuda_stub.test_step import no_inputs, started
from tests.support.cuda_stub.stub import Stub
from tests.support.processes import eventually

FOLDER = MODELS / "transformer" / "float32"


def test_a_wait_for_the_device_breaks_a_recording(stub: Stub) -> None:
    """As CUDA has it: both fail, whichever thread it is."""
    gpu, other = CudaDevice(0), CudaDevice(0)
    address = gpu.allocate(16)
    answers: list[Any] = []

    def wait() -> None:
        other.enter()
        answers.append(other._cuda.cuCtxSynchronize()[0].name)

    def work() -> None:
        gpu.zero(address, 16)
        thread = Thread(target=wait)
        thread.start()
        thread.join()

    assert gpu.record(work) is None
    assert answers == ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"]
    assert stub.counts()["waiting for a device that records"].calls == 1
    assert gpu.record(lambda: gpu.zero(address, 16)) is not None


def recorded_while(other: Callable[[], object], call: str, stub: Stub) -> bool:
    """Whether something could be recorded, in the midst of which another thread does this, which makes that call."""
    gpu, thread = CudaDevice(0), Thread(target=other)
    address = gpu.allocate(16)

    def work() -> None:
        thread.start()
        eventually(
            lambda: gate_of(0).waiting > 0 or call in stub.counts(), "it waits at the gate, or has made the call"
        )
        gpu.zero(address, 16)

    recorded = gpu.record(work)
    thread.join()
    assert call in stub.counts()
    assert "waiting for a device that records" not in stub.counts()
    return recorded is not None


def test_a_model_is_opened_when_the_recording_of_another_one_is_over(stub: Stub) -> None:
    """ONNX Runtime waits for the whole device when it opens one."""
    loaded: list[GpuBackend] = []
    assert recorded_while(lambda: loaded.append(backend_of(FOLDER)[0]), "cudaDeviceSynchronize", stub)
    assert loaded


def test_a_model_goes_when_the_recording_of_another_one_is_over(stub: Stub) -> None:
    """The handles of cuBLAS and cuDNN that go with it wait for the whole device."""
    going = [started(FOLDER, 2, 2, 64)]
    going[0].run(no_inputs(2, 2))
    stub.reset()
    assert recorded_while(going.clear, "cublasDestroy_v2", stub)


@pytest.mark.parametrize("graph", ["step", "score"])
def test_nothing_is_recorded_while_a_session_is_opened(graph: str, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """`score` is opened when it is first needed."""
    gpu = CudaDevice(0)
    address, asked = gpu.allocate(16), list[tuple[str, object]]()

    def recording(path: Path) -> Any:
        asked.append((path.stem, gpu.record(lambda: gpu.zero(address, 16))))
        return read_graph(path)

    monkeypatch.setattr(onnxruntime_cuda, "read_graph", recording)
    backend, _ = backend_of(FOLDER)
    backend._graphs.spec("score")
    assert (graph, None) in asked
    assert gpu.record(lambda: gpu.zero(address, 16)) is not None


def test_a_step_is_recorded_later_where_a_model_was_being_loaded(stub: Stub) -> None:
    backend = started(EN_DE, 4, 2, 64)
    with gate_of(0).opening():
        for _ in range(3):
            backend.run(no_inputs(4, 2))
    assert backend.device_stats().replayed == 0
    for _ in range(4):
        backend.run(no_inputs(4, 2))
    assert backend.device_stats().replayed == 2
    assert stub.held.graphs == 1
    del backend
    gc.collect()
