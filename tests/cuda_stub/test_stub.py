"""The stub itself: what CUDA refuses is refused, and noted; and our kernels are what their source says."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi import build_and_package_info

from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.probe import probe
from beamline.serving.backends.selection import NEEDED_CUDA
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.replicas import Replicas
from beamline.serving.errors import ComputeError
from beamline.serving.models.engines import EngineSettings, load_everywhere
from tests.cuda_stub.conftest import MODELS, on_gpu
from tests.cuda_stub.conversation import KINDS, Conversation
from tests.cuda_stub.test_step import no_inputs, started
from tests.support.cuda_stub.kernels import COMPILED, compiled
from tests.support.cuda_stub.plausible import make_plausible
from tests.support.cuda_stub.stub import Stub


def test_what_is_refused(stub: Stub) -> None:
    gpu = CudaDevice(0)
    address, host = gpu.allocate(1024), gpu.pinned(4096)
    driver: Any = gpu._cuda
    refused = (
        ("outside of allocated memory", lambda: gpu.upload(address, host)),
        (
            "the wrong kind of copy",
            lambda: gpu._check(driver.cuMemcpyDtoDAsync(address, host.ctypes.data, 8, gpu._stream)),
        ),
        ("freed what is not allocated", lambda: gpu._check(driver.cuMemFreeAsync(address + 512, gpu._stream))),
        ("not a stream, or destroyed", lambda: destroyed_stream(driver)),
        ("waiting while recording", lambda: waits_while_recording(gpu)),
    )
    for what, work in refused:
        with pytest.raises(ComputeError):
            work()
        assert len(stub.wrong) == 1
        assert what in stub.wrong[0]
        stub.reset()


def test_it_is_of_the_cuda_that_onnx_runtime_is_built_for() -> None:
    """Which is what `--device auto` asks of a driver, too."""
    built_for = tuple(map(int, build_and_package_info.cuda_version.split(".")))
    assert built_for == NEEDED_CUDA
    assert probe().driver == build_and_package_info.cuda_version


def destroyed_stream(driver: Any) -> None:
    _, stream = driver.cuStreamCreate(0)
    driver.cuStreamDestroy(stream)
    if driver.cuStreamSynchronize(stream)[0] != driver.CUresult.CUDA_SUCCESS:
        raise ComputeError


def waits_while_recording(gpu: CudaDevice) -> None:
    if gpu.record(lambda: gpu.wait(gpu.mark())) is None:
        raise ComputeError


def test_the_host_can_not_read_device_memory(stub: Stub) -> None:
    code = (
        "import ctypes; from beamline.serving.backends.cuda import CudaDevice; "
        "ctypes.string_at(CudaDevice(0).allocate(64), 8)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == -11


def test_copies_are_done_late_and_in_order(stub: Stub) -> None:
    gpu = CudaDevice(0)
    address, host = gpu.allocate(64), gpu.pinned(64)
    host[...] = 1
    gpu.upload(address, host)
    host[...] = 2  # too early: the copy is still to come
    back = gpu.pinned(64)
    gpu.download(back, address)
    assert ctypes.string_at(back.ctypes.data, 1) == b"\xa5"  # nobody has waited
    gpu.wait(gpu.mark())
    assert set(back.tolist()) == {2}


def test_several_devices(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its engine and its memory, and what belongs to one is used and freed there, by whichever thread."""
    from beamline.serving.backends.gpu import GpuBackend

    monkeypatch.setenv("CUDA_STUB_DEVICES", "3")
    monkeypatch.setattr(GpuBackend, "collect", GpuBackend.collect)
    make_plausible()
    assert [device.number for device in probe().devices] == [0, 1, 2]
    before = stub.held
    folder = MODELS / "transformer" / "float32"
    engines = load_everywhere(
        folder, read_manifest(folder), EngineSettings(choice=on_gpu(), slots=4), lambda stats: None
    )
    assert isinstance(engines, Replicas)
    assert [engine.device for engine in engines.engines] == [0, 1, 2]
    taken = [now - then for now, then in zip(stub.held.device_bytes, before.device_bytes, strict=True)]
    assert len(set(taken[:3]) - {0}) == 1  # the same on all three
    for engine in engines.engines:
        talk = Conversation(engine)
        for number, options in enumerate(KINDS):
            talk.submit(number, options, 5)
        talk.finish()
    del engines, engine, talk
    gc.collect()
    assert stub.held == before


def test_a_run_is_on_its_own_device(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever whoever prepared it has left the thread on."""
    monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
    backend, other = started(MODELS / "transformer" / "float32", 2, 4, 64), CudaDevice(1)
    prepare, current = backend._runner.prepare, list[int]()

    def wandering(graph: str, tensors: Any, keep: bool = False) -> Any:
        run = prepare(graph, tensors, keep)

        def noted() -> None:
            current.append(int(other._cuda.cuCtxGetCurrent()[1]))
            run()

        other.enter()
        return noted

    monkeypatch.setattr(backend._runner, "prepare", wandering)
    backend.encode([[5, 6, 7]])
    backend.score([5, 6, 7], [2, 3, 4], start_token=1)
    backend.run(no_inputs(2, 4))
    assert current == [1, 1, 1]  # the context of the first


def test_our_kernels_are_those_of_their_source() -> None:
    """And compile for every GPU that is served."""
    assert COMPILED.read_text() == compiled()
    for capability in (75, 80, 86, 89, 90, 100, 120):
        assert ".entry gather_16" in compiled(f"compute_{capability}")


def test_uploads_of_any_size_arrive(stub: Stub) -> None:
    """They go through two halves of pinned memory, in turns."""
    gpu, chance = CudaDevice(0), np.random.default_rng(1)
    values = [chance.integers(0, 255, size, dtype=np.uint8) for size in (3, 2**20, 5 * 2**20 + 7, 100, 2**20 - 1)]
    addresses = [gpu.allocate(len(each)) for each in values]
    for address, each in zip(addresses, values, strict=True):
        gpu.upload(address, each)
    for address, each in zip(addresses, values, strict=True):
        host = gpu.pinned(len(each))
        gpu.download(host, address)
        gpu.wait(gpu.mark())
        np.testing.assert_array_equal(host, each)
    assert "copy H2D pageable" not in stub.counts()


def test_who_ends_a_device_leaves_the_threads_own_alone(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage may end a model on the thread of another GPU."""
    monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
    other, gpu = CudaDevice(0), CudaDevice(1)
    gpu.enter()
    mine = gpu._cuda.cuCtxGetCurrent()[1]
    assert other.drain()
    assert int(gpu._cuda.cuCtxGetCurrent()[1]) == int(mine)
    stub.lose(0)
    assert not other.drain()
    assert int(gpu._cuda.cuCtxGetCurrent()[1]) == int(mine)
    stub.heal()
