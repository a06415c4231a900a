"""The code that speaks to CUDA, and the tests that need a GPU, over an emulated CUDA: every call with its arguments.

What a GPU computes is left to `make test-gpu`; that those tests themselves are sound is shown here.
"""

from __future__ import annotations

import gc
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from beamline.converters.passes.lowering import lower
from beamline.serving.backends.capture_gate import COLLECTOR, gate_of
from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.device import GraphRunner, is_lost
from beamline.serving.backends.factory import Made, make_backend
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.one_shot import GpuGraphs
from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner
from beamline.serving.backends.pooled import PooledGraphBackend
from beamline.serving.backends.probe import CudaDevice as Found
from beamline.serving.backends.probe import probe
from beamline.serving.backends.selection import Choice
from beamline.serving.backends.tensorrt import LibraryRuntime, TensorRtRunner
from beamline.serving.contract.backend import PooledBackend
from beamline.serving.contract.manifest import AnyManifest, PooledManifest, read_any_manifest, read_manifest
from beamline.serving.contract.tensorrt_plans import ENGINES, plan_path, read_cards
from beamline.serving.errors import ComputeError, DeviceLost, ModelError, OutOfMemory
from tests.gpu import test_gpu
from tests.gpu.conftest import BUCKETS, MODELS, SLOTS, ModelOnGpu, OnGpu, PooledOnGpu
from tests.support.cuda_driver import EmulatedCuda
from tests.support.emulator import CAPABILITY, MODULE, VERSION, write_emulated_plans
from tests.support.marian_shape import MarianShape
from tests.support.shipped import shipped
from tests.support.tensorrt_library import EmulatedLibrary, _Engine, _Runtime, fits

pytestmark = pytest.mark.skipif(bool(probe().devices), reason="there is a GPU, and calls to CUDA would do something")
GPU = Found(0, "emulated", CAPABILITY, 2**30)
CHECKS: tuple[Callable[[OnGpu], None], ...] = (
    test_gpu.test_numbers_are_those_of_the_cpu,
    test_gpu.test_the_engine_gives_the_same_answers,
    test_gpu.test_the_host_waits_once_per_step,
    test_gpu.test_recorded_steps_are_the_same,
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    emulated = EmulatedCuda()
    monkeypatch.setattr("cuda.bindings.driver", emulated)
    return emulated


def on_device(cuda: EmulatedCuda, folder: Path, manifest: AnyManifest, kind: str) -> tuple[CudaDevice, GraphRunner]:
    """A real `CudaDevice`; the graphs are run by ONNX Runtime on the CPU, when their turn in the stream comes."""
    gpu = CudaDevice(0)
    if kind == "cuda":
        launch = cuda.device.launch
        return gpu, OnnxRuntimeCudaRunner(folder, manifest, 0, gpu.stream, place="cpu", launch=launch, owner=gpu)
    library = EmulatedLibrary(cuda.device, folder, gpu.stream)
    return gpu, TensorRtRunner(
        folder, manifest, gpu, LibraryRuntime(library, MODULE, gpu.number, gpu.stream, CAPABILITY)
    )


@dataclass(frozen=True)
class OnEmulated(OnGpu):
    cuda: EmulatedCuda

    def backend(self) -> Made:
        gpu, runner = on_device(self.cuda, self.folder, self.manifest, self.choice.kind)
        buckets = runner.plans.cache_buckets if isinstance(runner, TensorRtRunner) else None
        return Made(GpuBackend(self.manifest, gpu, runner), buckets)


@dataclass(frozen=True)
class ModelOnEmulated(ModelOnGpu):
    cuda: EmulatedCuda

    backend = OnEmulated.backend


@dataclass(frozen=True)
class PooledOnEmulated(PooledOnGpu):
    cuda: EmulatedCuda

    def backend(self) -> PooledBackend:
        graphs = GpuGraphs(*on_device(self.cuda, self.folder, self.manifest, self.choice.kind))
        return PooledGraphBackend(self.manifest, graphs, SLOTS)


def choice_of(kind: str) -> Choice:
    return Choice("tensorrt" if kind == "tensorrt" else "cuda", (GPU,), "emulated", MODULE)


def prepared(model: MarianShape, folder: Path, kind: str, precision: str, cuda: EmulatedCuda) -> OnEmulated:
    shutil.copytree(model.folder, folder)
    manifest = model.manifest
    if precision != "float32":
        manifest, _ = lower(folder, manifest, precision)
    if kind == "tensorrt":
        write_emulated_plans(folder, manifest, BUCKETS, SLOTS)
    return OnEmulated(folder, manifest, choice_of(kind), model, cuda)


@pytest.mark.parametrize("kind", ["tensorrt", "cuda"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_what_make_test_gpu_checks(
    check: Callable[[OnGpu], None], kind: str, plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda
) -> None:
    check(prepared(plain_model, tmp_path / "version", kind, "float32", cuda))
    assert ("cuGraphLaunch" in cuda.calls) == (kind == "tensorrt")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["tensorrt", "cuda"])
def test_other_precisions(
    kind: str, precision: str, plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda
) -> None:
    on_gpu = prepared(plain_model, tmp_path / "version", kind, precision, cuda)
    for check in CHECKS:
        check(on_gpu)
    test_gpu.test_throughput(on_gpu, 8, 4, lambda name, value: None)


@pytest.mark.parametrize("kind", ["tensorrt", "cuda"])
@pytest.mark.parametrize("model", MODELS)
def test_other_models(
    model: str, kind: str, tmp_path: Path, cuda: EmulatedCuda, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "version"
    shutil.copytree(shipped(model) if model != "language" else request.getfixturevalue("language_model").folder, folder)
    manifest = read_manifest(folder)
    if kind == "tensorrt":
        write_emulated_plans(folder, manifest, BUCKETS, SLOTS)
    test_gpu.test_other_models_answer_as_on_the_cpu(ModelOnEmulated(folder, manifest, choice_of(kind), cuda))


@pytest.mark.parametrize("kind", ["tensorrt", "cuda"])
def test_a_classifier(kind: str, pooled_repository: Path, tmp_path: Path, cuda: EmulatedCuda) -> None:
    folder = tmp_path / "version"
    shutil.copytree(pooled_repository / "mood" / "1", folder)
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    if kind == "tensorrt":
        write_emulated_plans(folder, manifest, slots=SLOTS)
    test_gpu.test_a_classifier(PooledOnEmulated(folder, manifest, choice_of(kind), cuda))


def test_an_unloaded_model_gives_its_memory_back(plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda) -> None:
    made = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda).backend()
    test_gpu.started(made.backend, 2, 4, 64)
    for _ in range(3):
        made.backend.run(test_gpu.no_inputs(2, 4))
    assert cuda.device.allocated_bytes > 100_000
    del made
    gc.collect()  # as the server does
    assert cuda.device.allocated_bytes == 0
    assert {"cuStreamDestroy", "cuMemFreeHost", "cuGraphExecDestroy"} <= set(cuda.calls)


def test_tensorrt_rtx_captures_by_itself(plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda) -> None:
    """It is told to when a context is made, and we record nothing around it."""
    found = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda)
    for card in (found.folder / ENGINES).glob("*.json"):
        card.write_text(card.read_text().replace(f'"module": "{MODULE}"', '"module": "tensorrt_rtx"'))
    gpu = CudaDevice(0)
    library = EmulatedLibrary(cuda.device, found.folder, gpu.stream, "tensorrt_rtx")
    runtime = LibraryRuntime(library, "tensorrt_rtx", gpu.number, gpu.stream, CAPABILITY)
    assert (runtime.version, runtime.records) == (VERSION, False)
    backend = GpuBackend(found.manifest, gpu, TensorRtRunner(found.folder, found.manifest, gpu, runtime))
    test_gpu.started(backend, 2, 4, 64)
    for _ in range(3):
        backend.run(test_gpu.no_inputs(2, 4))
    assert "cuStreamBeginCapture" not in cuda.calls
    assert {config.cuda_graph_strategy for config in library.made_with} == {
        library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    }


@pytest.mark.parametrize(
    ("said", "rebuild"),
    [
        (["The engine plan file is generated on an incompatible device, expecting compute 8.6, please rebuild."], True),
        (["Serialization assertion magicTagRead == kMAGIC_TAG failed. Magic tag does not match"], True),
        (["Requested amount of GPU memory (9 bytes) could not be allocated.", "Engine deserialization failed."], False),
        (["CUDA initialization failure with error: 35"], False),
        ([], False),
    ],
)
def test_a_plan_that_tensorrt_does_not_load(
    said: list[str],
    rebuild: bool,
    plain_model: MarianShape,
    tmp_path: Path,
    cuda: EmulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cause is what the library logs; to build again is advised where that helps."""
    found = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda)
    gpu = CudaDevice(0)
    library = EmulatedLibrary(cuda.device, found.folder, gpu.stream)
    runtime = LibraryRuntime(library, MODULE, gpu.number, gpu.stream, CAPABILITY)
    card = read_cards(found.folder)[0]
    library.say("of an earlier plan, please rebuild")
    library.say("a warning", trt.ILogger.WARNING)

    def refuse(content: bytes) -> None:
        for message in said:
            library.say(message)

    monkeypatch.setattr(runtime._runtime, "deserialize_cuda_engine", refuse)
    with pytest.raises(ModelError) as refused:
        runtime.load(plan_path(found.folder, card), card)
    assert f"can't be loaded by {MODULE} {VERSION}: {'; '.join(said) or 'it does not say why'}" in str(refused.value)
    assert ("beamline build --rebuild" in str(refused.value)) == rebuild
    assert "earlier" not in str(refused.value)


def test_every_model_hears_what_is_said_of_its_own_calls(
    plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda
) -> None:
    """The library has one logger per process: that of a model that is gone by now, if each had its own. And it says
    things to several threads at once."""
    folder = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda).folder
    gpu = CudaDevice(0)
    library = EmulatedLibrary(cuda.device, folder, gpu.stream)
    LibraryRuntime(library, MODULE, gpu.number, gpu.stream, CAPABILITY)
    gc.collect()
    runtime = LibraryRuntime(library, MODULE, gpu.number, gpu.stream, CAPABILITY)
    card = read_cards(folder)[0]
    engine = runtime.load(plan_path(folder, card), card)
    context = engine.context(gpu.allocate(engine.activation_bytes))
    name, largest = card.inputs[0].name, card.profile[card.inputs[0].name].largest
    assert not context.set_shape("nonsense", (2,))
    assert context.last_error() == "nonsense can't have the shape (2,)"
    assert context.set_shape(name, largest)
    assert context.last_error() == "it does not say why"  # what it said before is not about this
    assert not context.enqueue()
    elsewhere = threading.Thread(target=library.say, args=("to somebody else",))
    elsewhere.start()
    elsewhere.join()
    assert context.last_error() == "it can't be run"


@pytest.mark.parametrize(
    ("owner", "call"), [(_Runtime, "deserialize_cuda_engine"), (_Engine, "create_execution_context")]
)
def test_nothing_is_recorded_while_tensorrt_takes_memory(
    owner: type,
    call: str,
    plain_model: MarianShape,
    tmp_path: Path,
    cuda: EmulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it while something is recorded on that GPU: it may wait for all of it, which breaks a recording."""
    found = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda)
    gpu = CudaDevice(0)
    address, asked, original = gpu.allocate(16), list[object](), getattr(owner, call)

    def recording(*arguments: Any) -> Any:
        asked.append(gpu.record(lambda: gpu.zero(address, 16)))
        return original(*arguments)

    monkeypatch.setattr(owner, call, recording)
    backend = found.backend().backend
    test_gpu.started(backend, 2, 4, 64)
    assert asked
    assert set(asked) == {None}
    assert gpu.record(lambda: gpu.zero(address, 16)) is not None


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Error Code 1: Cuda Runtime (out of memory)", OutOfMemory),
        ("Error Code 2: OutOfMemory (Requested size was 2097152 bytes.)", OutOfMemory),
        ("Requested amount of GPU memory (9 bytes) could not be allocated.", OutOfMemory),
        ("GPU memory allocation failed during initialization of layer: x", OutOfMemory),
        ("Error Code 1: Cublas (CUBLAS_STATUS_ALLOC_FAILED)", OutOfMemory),
        ("cannot allocate memory for temporary tensor.; Error Code 2: Internal Error", OutOfMemory),
        ("Error Code 1: Cuda Runtime (an illegal memory access was encountered)", ComputeError),
        ("IExecutionContext::setDeviceMemoryV2 should be called before enqueue, for device memory", ComputeError),
        ("Allocated GPU memory is not aligned with GPU memory allocation granularity of 2", ComputeError),
    ],
)
def test_too_little_memory_is_told_from_other_trouble_with_memory(
    said: str, kind: type[Exception], plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda
) -> None:
    """It costs one request, and the others go on; anything else fails them."""
    found = prepared(plain_model, tmp_path / "version", "tensorrt", "float32", cuda)
    gpu = CudaDevice(0)
    library = EmulatedLibrary(cuda.device, found.folder, gpu.stream)
    runtime = LibraryRuntime(library, MODULE, gpu.number, gpu.stream, CAPABILITY)
    feeds = {"source": np.array([[5, 6]]), "source_mask": np.ones((1, 2), np.bool_)}

    def runner() -> TensorRtRunner:
        return TensorRtRunner(found.folder, found.manifest, gpu, runtime)

    graphs = GpuGraphs(gpu, runner())
    attempts = {"make an execution context": runner, "run it": lambda: graphs.run("encoder", feeds)}
    for doing, attempt in attempts.items():
        library.trouble = said
        with pytest.raises((OutOfMemory, ComputeError), match=f"could not {doing}: {re.escape(said)}") as refused:
            attempt()
        assert type(refused.value) is kind
        library.trouble = None
        attempt()
    gpu.finish()


def test_a_recording_for_which_there_is_no_memory(plain_model: MarianShape, tmp_path: Path, cuda: EmulatedCuda) -> None:
    """What it recorded is asked for without it: cuBLAS may have recorded that it takes memory."""
    scores = []
    for fails in (False, True):
        backend = prepared(plain_model, tmp_path / str(fails), "tensorrt", "float32", cuda).backend().backend
        test_gpu.started(backend, 2, 4, 64)
        for _ in range(4):
            backend.run(test_gpu.no_inputs(2, 4))
        if fails:
            cuda.failing["cuGraphLaunch"] = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        scores.append([backend.run(test_gpu.no_inputs(2, 4)).candidate_scores.copy() for _ in range(3)])
    assert not cuda.failing
    np.testing.assert_array_equal(scores[0], scores[1])


def test_signatures_are_read_from_the_bindings() -> None:
    assert fits(trt.IExecutionContext, "set_device_memory", 2)
    assert not fits(trt.IExecutionContext, "set_device_memory", 1)
    assert fits(trt.ICudaEngine, "create_execution_context", 0)  # it has defaults
    assert not fits(trt.IExecutionContext, "execute_async_v3", 2)


def test_new_memory_is_zeroed(cuda: EmulatedCuda) -> None:
    """CUDA's is not, and a NaN in a masked entry would poison attention."""
    gpu = CudaDevice(0)
    address = gpu.allocate(1000)
    assert not cuda.device.view(address, "int8", (1000,)).any()


def test_what_cuda_refuses_is_a_sentence(cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaDevice(0)
    codes = cuda.CUresult

    def failing(code: Any) -> Callable[..., tuple[Any, int]]:
        return lambda *arguments: (code, 0)

    monkeypatch.setattr(cuda, "cuMemAllocFromPoolAsync", failing(codes.CUDA_ERROR_OUT_OF_MEMORY), raising=False)
    with pytest.raises(ModelError, match=r"GPU 0 has 1 of 1,024 MiB left, and 3 more are needed: lower --max-slots"):
        gpu.allocate(3 * 2**20)
    monkeypatch.setattr(cuda, "cuMemAllocFromPoolAsync", failing(codes.CUDA_ERROR_ILLEGAL_ADDRESS), raising=False)
    with pytest.raises(ComputeError, match=r"GPU 0: CUDA says: illegal"):
        gpu.allocate(1)


STAYING = "MISALIGNED_ADDRESS ILLEGAL_INSTRUCTION INVALID_ADDRESS_SPACE INVALID_PC CONTEXT_IS_DESTROYED CONTAINED "
STAYING += "TENSOR_MEMORY_LEAK NVLINK_UNCORRECTABLE EXTERNAL_DEVICE MPS_CLIENT_TERMINATED"


@pytest.mark.parametrize("name", STAYING.split())
def test_an_error_that_stays_is_the_device_s(name: str, cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks next would be told it again, so it is no request's own fault."""
    gpu = CudaDevice(0)
    assert not is_lost(gpu)
    code = getattr(cuda.CUresult, f"CUDA_ERROR_{name}")
    monkeypatch.setattr(cuda, "cuMemsetD8Async", lambda *arguments: (code,), raising=False)
    with pytest.raises(DeviceLost, match="GPU 0: CUDA says: "):
        gpu.allocate(16)
    monkeypatch.setattr(cuda, "cuMemGetInfo", lambda: (code, 0, 0), raising=False)
    assert is_lost(gpu)


def test_a_device_that_can_not_say_what_memory_it_has_is_lost(
    cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CudaDevice(0)
    code = cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED
    monkeypatch.setattr(cuda, "cuMemGetInfo", lambda: (code, 0, 0), raising=False)
    assert is_lost(gpu)


def test_a_launch_that_can_not_be_recorded_goes_on_without(cuda: EmulatedCuda) -> None:
    gpu = CudaDevice(0)
    address, values = gpu.allocate(16), np.arange(4, dtype=np.int32)
    assert gpu.record(lambda: gpu.wait(gpu.mark())) is None  # the host would wait
    gpu.upload(address, values)  # and the stream has left capture
    assert cuda.device.view(address, "int32", (4,)).tolist() == [0, 1, 2, 3]


def test_pinned_memory_is_freed_when_nothing_uses_it(cuda: EmulatedCuda) -> None:
    gpu = CudaDevice(0)
    array = gpu.pinned(64)
    part = array[:8]
    del array
    part[...] = 1  # the whole of it lives as long as a part
    gpu.download(part, gpu.allocate(8))
    del part
    assert "cuMemFreeHost" not in cuda.calls  # the copy may still be on its way
    gpu.wait(gpu.mark())
    gpu.wait(gpu.mark())
    assert cuda.calls.count("cuMemFreeHost") == 1


def test_garbage_is_not_freed_within_a_recording(cuda: EmulatedCuda) -> None:
    """It would be freed again at every replay."""
    gpu = CudaDevice(0)
    address, other = gpu.allocate(16), gpu.allocate(16)

    def work() -> None:
        gpu.free(other)  # as the collector of garbage does, whenever it likes
        gpu.copy(address, other, 16)

    assert gpu.record(work) is not None
    assert "cuMemFreeAsync" not in cuda.calls
    gpu.allocate(16)
    assert cuda.calls.count("cuMemFreeAsync") == 1


def test_garbage_is_not_collected_within_a_recording(cuda: EmulatedCuda) -> None:
    """A session that is closed there would free its memory at once, and break the recording."""

    class Session:
        def __init__(self) -> None:
            self.itself = self

    gpu, gone, during = CudaDevice(0), list[str](), list[list[str]]()
    address = gpu.allocate(16)

    def work() -> None:
        weakref.finalize(Session(), gone.append, "gone")
        garbage: list[list[int]] = [[] for _ in range(100_000)]  # enough that it would collect
        during.append(list(gone))
        gpu.zero(address, len(garbage[:16]))

    assert gpu.record(work) is not None
    assert during == [[]]
    assert gc.isenabled()
    gc.collect()
    assert gone == ["gone"]


def test_a_model_that_ends_as_a_recording_does_waits_for_nobody(cuda: EmulatedCuda) -> None:
    """The collector, which has had a pause, may find a model of the same GPU just then, on the same thread."""
    gpu, closed = CudaDevice(0), list[bool]()
    address = gpu.allocate(16)

    class Model:
        pass

    def close() -> None:
        with gate_of(0).opening():
            closed.append(True)

    def work() -> None:
        model = Model()
        model.itself = model  # type: ignore[attr-defined]
        weakref.finalize(model, close)
        gpu.zero(address, 16)

    thread = threading.Thread(target=gpu.record, args=(work,), daemon=True)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread.start()
        thread.join(30.0)
    finally:
        gc.set_threshold(*before)
    assert not thread.is_alive()
    gc.collect()
    assert closed == [True]


def test_the_collector_goes_on_when_the_last_one_does_not_mind() -> None:
    with COLLECTOR.paused():
        with COLLECTOR.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_second_gpu_without_plans_says_how_they_are_built(
    plain_model: MarianShape, cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tensorrt` builds for the first GPU that it sees, so this one has to be that."""
    second = Found(1, "emulated", CAPABILITY, 2**30, "00000000-0000-0000-0000-00000000cafe")
    choice = Choice("tensorrt", (GPU, second), "asked for", MODULE)
    monkeypatch.setitem(sys.modules, MODULE, EmulatedLibrary(cuda.device, plain_model.folder, 0))
    monkeypatch.setattr("beamline.serving.backends.cuda.CudaDevice", lambda number: CudaDevice(0))  # there is but one
    advice = f"beamline build {plain_model.manifest.name} --compute-capability {CAPABILITY} --library {MODULE}"
    for device, before in ((GPU, ""), (second, f"CUDA_VISIBLE_DEVICES=GPU-{second.uuid} ")):
        with pytest.raises(ModelError, match=f"run `{before}{advice}`"):
            make_backend(plain_model.folder, plain_model.manifest, 1, choice, device, {})
