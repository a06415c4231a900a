"""What one decode step asks of CUDA, counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamline.serving.backends import onnxruntime_cuda
from beamline.serving.backends.gpu import _SHORT_LISTS, GpuBackend
from beamline.serving.contract.backend import Shape, Start, StepInputs
from tests.cuda_stub.conftest import EN_DE, EN_DE_GRU, MODELS, backend_of
from tests.support.cuda_stub.stub import Count, Stub, waits

BATCH, BEAMS, SOURCE, STEPS = 32, 4, 32, 10


def no_inputs(batch: int, beams: int) -> StepInputs:
    none = np.zeros((batch, beams, 0), np.float32)
    return StepInputs(np.full(batch, -1), none.astype(np.int64), none, none)


def edited(batch: int, beams: int, edits: int) -> StepInputs:
    index = np.broadcast_to(np.arange(edits), (batch, beams, edits)).astype(np.int64)
    ones = np.ones(index.shape, np.float32)
    return StepInputs(np.full(batch, -1), index, ones, -ones)


def sampled(batch: int, beams: int) -> StepInputs:
    plain, rows = no_inputs(batch, beams), np.arange(batch * beams)
    settings = np.tile(np.array([0.5, 1, 10, 0.9, 0], np.float32), (len(rows), 1))
    return StepInputs(plain.forced, plain.edit_index, plain.edit_scale, plain.edit_add, rows, settings)


def reported(batch: int, beams: int) -> StepInputs:
    return dataclasses.replace(no_inputs(batch, beams), report_rows=np.arange(batch * beams))


def started(folder: Path, batch: int, beams: int, cache: int, slots: int | None = None) -> GpuBackend:
    backend, manifest = backend_of(folder)
    shape = Shape(batch, beams, cache, SOURCE)
    slots = slots or batch
    backend.allocate(slots, Shape(slots, beams, cache, SOURCE))
    backend.resize(shape, 0)
    for slot, memory in enumerate(backend.encode([[5 + place % 7 for place in range(SOURCE)]] * batch)):
        backend.place(slot, memory, Start(manifest.vocabulary.eos_ids[0], beams, independent=False))
    return backend


def counted(stub: Stub, backend: GpuBackend, inputs: StepInputs) -> dict[str, Count]:
    """Of one step, on average over some, when it recurs."""
    for _ in range(3):
        backend.run(inputs)
    stub.reset()
    for _ in range(STEPS):
        backend.run(inputs)
    return {name: Count(n.calls // STEPS, n.bytes // STEPS, n.largest) for name, n in stub.counts().items()}


EDIT_BYTES = 16  # a word, a factor and a summand, for each beam
PLAIN_BYTES, SAMPLED_BYTES = 1024, 4096  # that may be uploaded
KINDS: dict[str, tuple[StepInputs, int]] = {
    "plain": (no_inputs(BATCH, BEAMS), PLAIN_BYTES),
    "sampled": (sampled(BATCH, BEAMS), SAMPLED_BYTES),
    "reported": (reported(BATCH, BEAMS), 2 * PLAIN_BYTES + 256),
    "4 edits": (edited(BATCH, BEAMS, 4), PLAIN_BYTES + BATCH * BEAMS * 4 * EDIT_BYTES),
    "64 edits": (edited(BATCH, BEAMS, 64), PLAIN_BYTES + BATCH * BEAMS * 64 * EDIT_BYTES),
}


def check_counts(found: dict[str, Count], cache: int, state: int, uploaded: int, recorded: bool) -> None:
    """One upload, one graph, small copies, one wait. Only the ancestry, a byte for each beam and cache entry, grows:
    not with the vocabulary, of which the scores are four megabytes, and not with the caches."""
    assert waits(found) == 1
    assert not [name for name in found if "pageable" in name]
    assert found["copy H2D"].bytes <= uploaded
    ancestry = BATCH * BEAMS * cache
    assert found["copy D2D"].largest <= max(ancestry, state, 8192)
    assert found["copy D2D"].bytes <= (ancestry + state + 8192 if recorded else 2 * (ancestry + state) + 2**16)
    if recorded:
        assert found["cuGraphLaunch"].calls == 1
        assert "kernel launch" not in found  # all are within the graph
    assert not {"cudaMalloc", "cuMemAllocFromPoolAsync", "cuMemHostAlloc", "cuEventCreate", "cuMemFreeAsync"} & set(
        found
    )


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("cache", [256, 2048])
@pytest.mark.parametrize("folder", [EN_DE, EN_DE_GRU], ids=["en-de", "en-de-gru"])
def test_what_a_step_asks_of_cuda(folder: Path, cache: int, recorded: bool, stub: Stub) -> None:
    """Of every kind of step; replayed, and as the graph runs where it is not recorded."""
    backend = started(folder, BATCH, BEAMS, cache)
    backend._runner.records = recorded
    state = BATCH * BEAMS * 512 * 4 if folder == EN_DE_GRU else 0  # which beams exchange
    for inputs, uploaded in KINDS.values():
        check_counts(counted(stub, backend, inputs), cache, state, uploaded, recorded)


def test_without_our_changes_of_the_graph_it_asks_for_more(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the counts above can fail: scores of all words are copied, and a size comes from pageable memory."""
    monkeypatch.setattr(onnxruntime_cuda, "STEP_REWRITES", ())
    backend = started(EN_DE, BATCH, BEAMS, 256)
    backend._runner.records = False
    found = counted(stub, backend, KINDS["4 edits"][0])
    assert found["copy H2D pageable"].calls == 1
    assert found["copy D2D"].largest >= 4 * BATCH * BEAMS * 8000
    with pytest.raises(AssertionError):
        check_counts(found, 256, 0, KINDS["4 edits"][1], recorded=False)


def test_uploads_are_in_proportion(stub: Stub) -> None:
    backend = started(EN_DE, BATCH, BEAMS, 256)
    few, many = (counted(stub, backend, edited(BATCH, BEAMS, edits))["copy H2D"].bytes for edits in (4, 64))
    assert 14 * few < many < 18 * few


def test_launches_recur_while_requests_come_and_go(stub: Stub) -> None:
    """Steps of 1 to 32 requests are launches of ten shapes, each recorded once."""
    backend = started(EN_DE, BATCH, BEAMS, 256)
    for _ in range(3):
        for batch in range(1, BATCH + 1):
            backend.resize(Shape(batch, BEAMS, 256, SOURCE), batch)
            assert backend.run(no_inputs(batch, BEAMS)).tokens.shape == (batch, BEAMS)
    assert stub.held.graphs == 10
    assert len(backend._launches) == 10
    stats = backend.device_stats()
    assert stats.replayed >= 96 - 2 * 10
    assert stats.seconds > 96 * 1e-6  # a piece of work takes the stub a microsecond


def test_room_for_long_lists_is_given_back(stub: Stub) -> None:
    backend = started(EN_DE, 4, 2, 64)
    backend.run(no_inputs(4, 2))
    usual = stub.held
    for edits in (2048, 7000, 512):
        backend.run(edited(4, 2, edits))
    assert stub.held.device_bytes[0] > usual.device_bytes[0] + 4 * 2 * 7000 * 16
    for _ in range(_SHORT_LISTS + 4):
        backend.run(no_inputs(4, 2))
    held = stub.held
    assert held.pinned_bytes == usual.pinned_bytes
    assert backend._inputs.nbytes < 100_000


def test_layouts_and_compaction_are_a_few_calls(stub: Stub) -> None:
    """However many slots there are, and however the entries that stay are scattered."""
    backend = started(EN_DE, BATCH, BEAMS, 256)
    backend.run(no_inputs(BATCH, BEAMS))
    stub.reset()
    backend.resize(Shape(BATCH, BEAMS, 512 // 4, SOURCE), BATCH)
    found = stub.counts()
    assert found["copy D2D"].calls == 2 * 5  # four caches and the ancestry, there and back
    stub.reset()
    backend.compact(3, list(range(0, 120, 2)))
    found = stub.counts()
    assert (found["cuLaunchKernel"].calls, found["copy D2D"].calls) == (5, 5)
    assert waits(found) == 0


def test_a_slot_is_filled_without_pageable_memory(stub: Stub) -> None:
    backend = started(MODELS / "transformer" / "float32", 4, 4, 64)
    stub.reset()
    memory = backend.encode([[5, 6, 7]])[0]
    backend.place(0, memory, Start(1, 4, independent=False))
    found = stub.counts()
    assert not [name for name in found if "pageable" in name]
    assert waits(found) == 0


def test_a_gather_is_a_gather(stub: Stub) -> None:
    """The kernel of gather.cu is really run here, compiled for the host."""
    from beamline.serving.backends.cuda import CudaDevice

    gpu, chance = CudaDevice(0), np.random.default_rng(0)
    for entry, rows, length in ((1, 3, 70), (16, 2, 33), (64, 4, 20), (256, 1, 9), (24, 2, 11)):
        values = chance.integers(0, 255, (rows, length, entry), dtype=np.uint8)
        address = gpu.allocate(values.nbytes)
        gpu.upload(address, values)
        index = np.sort(chance.choice(length, length // 2, replace=False)).astype(np.int64)
        gpu.gather(address, address, index, entry, rows, (length * entry,) * 2)
        host: Any = gpu.pinned(values.nbytes)
        gpu.download(host, address)
        gpu.wait(gpu.mark())
        found = host.reshape(values.shape)
        np.testing.assert_array_equal(found[:, : len(index)], values[:, index])
        np.testing.assert_array_equal(found[:, len(index) :], values[:, len(index) :])
