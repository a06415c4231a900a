"""On a real GPU: the numbers of the CPU, no waiting inside a step, CUDA graphs, and throughput.

`make test-gpu`. Not run on a GPU yet: no machine of ours has one (docs/gpu.md).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.backends.onnxruntime_cpu import CpuGraphs
from beamline.serving.backends.pooled import PooledGraphBackend
from beamline.serving.contract.backend import Shape, Start, StepInputs
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from tests.gpu.conftest import ModelOnGpu, OnGpu, PooledOnGpu
from tests.support.emulator import emulated_cuda_backend
from tests.support.engines import decode, results
from tests.support.marian_shape import MAX_LENGTH, PAD
from tests.support.ties import same_or_tie

pytestmark = pytest.mark.gpu
# Of a step's candidate scores, against the CPU: float32, or, of 8-bit weights, the same portable graphs.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5, "int8": 0.01, "int4": 0.01}
SAME_BEST = {"float32": 1.0, "float16": 0.8, "bfloat16": 0.5, "int8": 0.9, "int4": 0.9}
# What the host may ask of CUDA in a step. None of it waits, where the host's memory is pinned.
ASYNCHRONOUS = {
    "cuCtxSetCurrent",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuGraphLaunch",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventElapsedTime",
}
SOURCES = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16], [17]]
BEAM = DecodingOptions(beam_size=4, num_hypotheses=4, max_length=MAX_LENGTH)


def no_inputs(batch: int, beams: int) -> StepInputs:
    none = np.zeros((batch, beams, 0), np.float32)
    return StepInputs(np.full(batch, -1), none.astype(np.int64), none, none)


def started(backend: Any, batch: int, beams: int, cache: int) -> None:
    backend.allocate(batch, Shape(batch, beams, cache, 16))
    backend.resize(Shape(batch, beams, cache, 16), 0)
    sources = [SOURCES[row % len(SOURCES)] for row in range(batch)]
    for slot, memory in enumerate(backend.encode(sources)):
        backend.place(slot, memory, Start(PAD, beams, independent=beams == 1))


def on_cpu(on_gpu: OnGpu) -> Any:
    if on_gpu.manifest.precision in ("int8", "int4"):
        return emulated_cuda_backend(on_gpu.folder, on_gpu.manifest)
    return CpuBackend(on_gpu.reference.folder, on_gpu.reference.manifest, threads=1)


def bucket(made: Any, entries: int) -> int:
    return next(size for size in made.cache_buckets or (entries,) if size >= entries)


def test_numbers_are_those_of_the_cpu(on_gpu: OnGpu) -> None:
    """Every step continues from the CPU's own beams only where both agree, so compare the first steps."""
    made = on_gpu.backend()
    host = on_cpu(on_gpu)
    cache = bucket(made, 64)
    for each in (host, made.backend):
        started(each, batch=4, beams=4, cache=cache)
    for _ in range(4):  # the last one repeats a recording
        mine, theirs = made.backend.run(no_inputs(4, 4)), host.run(no_inputs(4, 4))
        difference = np.abs(mine.candidate_scores - theirs.candidate_scores).max()
        assert difference < TOLERANCE[on_gpu.manifest.precision]


def test_the_engine_gives_the_same_answers(on_gpu: OnGpu) -> None:
    """In float32 token for token, ties aside; in half, most of them."""
    made = on_gpu.backend()
    plan = Plan.of(on_gpu.manifest, 8)
    if made.cache_buckets:
        plan = replace(plan, cache_buckets=made.cache_buckets)
    requests = [(source, BEAM) for source in SOURCES * 4]
    found = results(decode(Engine(on_gpu.manifest, made.backend, plan, max_queue=100), requests, stagger=1))
    reference = Engine(on_gpu.manifest, on_cpu(on_gpu), Plan.of(on_gpu.manifest, 8), max_queue=100)
    expected = results(decode(reference, requests))
    same = [
        same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine.hypotheses[:1], theirs.hypotheses[:1], strict=True)
    ]
    assert sum(same) / len(same) >= SAME_BEST[on_gpu.manifest.precision]


def test_other_models_answer_as_on_the_cpu(model_on_gpu: ModelOnGpu) -> None:
    """Whole answers, and the scores of given texts."""
    manifest, made = model_on_gpu.manifest, model_on_gpu.backend()
    host = emulated_cuda_backend(model_on_gpu.folder, manifest)
    plan = Plan.of(manifest, 8)
    options = replace(BEAM, num_hypotheses=1, max_length=12)
    requests = [(source, options) for source in SOURCES * 4]
    engines = [
        Engine(manifest, backend, replace(plan, cache_buckets=buckets or plan.cache_buckets), max_queue=100)
        for backend, buckets in ((made.backend, made.cache_buckets), (host, None))
    ]
    found, expected = (results(decode(engine, requests, stagger=1)) for engine in engines)
    same = [
        same_or_tie(a.tokens, a.token_log_probs, b.tokens, b.token_log_probs)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine.hypotheses, theirs.hypotheses, strict=True)
    ]
    assert sum(same) / len(same) >= SAME_BEST[manifest.precision]
    sources = None if manifest.task == "generate" else SOURCES
    texts, labels = [source[:-1] or source for source in SOURCES], [source[1:] or source for source in SOURCES]
    mine, theirs = (each.score_batch(sources, texts, labels) for each in (made.backend, host))
    for ours, wanted in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=TOLERANCE[manifest.precision])


class Counted:
    """CUDA's driver, and what is asked of it: names, and the host's memory in copies."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.calls: list[str] = []
        self.host: list[int] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cuda, name)
        if not name.startswith("cu") or not callable(found) or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            of_host = {"cuMemcpyHtoDAsync": 1, "cuMemcpyDtoHAsync": 0}
            if name in of_host:
                self.host.append(arguments[of_host[name]])
            return found(*arguments)

        return call


def test_the_host_waits_once_per_step(on_gpu: OnGpu) -> None:
    """Everything that is asked of CUDA inside a step is counted: nothing of it may wait."""
    made = on_gpu.backend()
    backend = made.backend
    assert isinstance(backend, GpuBackend)
    started(backend, batch=4, beams=4, cache=bucket(made, 64))
    for _ in range(4):  # prepared, prepared for good, recorded, repeated
        backend.run(no_inputs(4, 4))
    device: Any = backend._device
    cuda, before = device._cuda, device.waits
    device._cuda = counted = Counted(cuda)
    backend.launch(no_inputs(4, 4))
    for _ in range(10):
        backend.launch(no_inputs(4, 4))  # the next one is asked for before this one is waited for
        assert set(counted.calls) <= ASYNCHRONOUS
        backend.collect()
        assert set(counted.calls) - ASYNCHRONOUS == {"cuEventSynchronize"}
        assert counted.calls.count("cuEventSynchronize") == 1
        counted.calls.clear()
    assert device.waits == before + 10
    assert counted.host
    for address in counted.host:  # a copy from or to pageable memory would wait
        wanted = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        assert cuda.cuPointerGetAttribute(wanted, address)[1] == cuda.CUmemorytype.CU_MEMORYTYPE_HOST
    backend.collect()  # an engine, too, goes only when nothing is in flight


def test_recorded_steps_are_the_same(on_gpu: OnGpu) -> None:
    """CUDA graphs on and off. CUDA refuses to record what waits for the host, so a recording also shows that nothing
    inside a step does, in TensorRT neither."""
    scores = []
    for records in (True, False):
        made = on_gpu.backend()
        backend: Any = made.backend
        backend._runner.records = records and backend._runner.records
        recordings = watched_recordings(backend._device)
        started(backend, batch=2, beams=4, cache=bucket(made, 64))
        scores.append([backend.run(no_inputs(2, 4)).candidate_scores.copy() for _ in range(8)])
        assert [recording is not None for recording in recordings] == [True] * backend._runner.records
    np.testing.assert_array_equal(scores[0], scores[1])


def watched_recordings(device: Any) -> list[Any]:
    found: list[Any] = []
    record = device.record

    def watched(work: Any) -> Any:
        found.append(record(work))
        return found[-1]

    device.record = watched
    return found


def test_a_classifier(pooled_on_gpu: PooledOnGpu) -> None:
    graphs = CpuGraphs(pooled_on_gpu.folder, pooled_on_gpu.manifest, threads=1)
    expected = PooledGraphBackend(pooled_on_gpu.manifest, graphs, len(SOURCES)).run(SOURCES)
    found = pooled_on_gpu.backend().run(SOURCES)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_throughput(on_gpu: OnGpu, batch: int, beams: int, record_property: Any) -> None:
    """Prints, and asserts nothing about speed."""
    made = on_gpu.backend()
    started(made.backend, batch, beams, bucket(made, 256))
    made.backend.run(no_inputs(batch, beams))
    began, steps = time.perf_counter(), 30
    for _ in range(steps):
        made.backend.run(no_inputs(batch, beams))
    rate = batch * steps / (time.perf_counter() - began)
    record_property("tokens_per_second", rate)
    print(f"{on_gpu.choice.kind} {on_gpu.manifest.precision}, batch {batch}, beam {beams}: {rate:,.0f} tokens/s")
