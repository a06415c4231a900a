"""What one decode step asks of CUDA, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parametrize("cache", [256, 2048])
@pytest.mark.parametrize("folder", [EN_DE, EN_DE_GRU], ids=["en-de", "en-de-gru"])
def test_a_plain_step(folder: Path, cache: int, stub: Stub) -> None:
    """One upload, one graph, small copies, one wait. Only the ancestry, a byte for each beam and cache entry, grows."""
    found = counted(stub, started(folder, BATCH, BEAMS, cache), no_inputs(BATCH, BEAMS))
    assert waits(found) == 1
    assert not [name for name in found if "pageable" in name]
    assert found["cuGraphLaunch"].calls == 1
    assert "kernel launch" not in found  # all are within the graph
    assert found["copy H2D"].bytes <= 1024
    ancestry, state = BATCH * BEAMS * cache, BATCH * BEAMS * 512 * 4 if folder == EN_DE_GRU else 0
    assert found["copy D2D"].bytes <= ancestry + state + 8192
    assert not {"cudaMalloc", "cuMemAllocFromPoolAsync", "cuMemHostAlloc", "cuEventCreate", "cuMemFreeAsync"} & set(
        found
    )


@pytest.mark.parametrize("folder", [EN_DE, EN_DE_GRU], ids=["en-de", "en-de-gru"])
def test_the_graph_itself_copies_nothing_that_grows_with_the_vocabulary(folder: Path, stub: Stub) -> None:
    """As it runs when it is not recorded."""
    backend = started(folder, BATCH, BEAMS, 256)
    backend._runner.records = False
    found = counted(stub, backend, no_inputs(BATCH, BEAMS))
    assert waits(found) == 1
    assert "copy H2D pageable" not in found
    assert found["kernel launch"].calls > 50
    assert (
        found["copy D2D"].largest < BATCH * BEAMS * 8000
    )  # words; scores of all of them have four times as many bytes
    for inputs in (edited(BATCH, BEAMS, 8), sampled(BATCH, BEAMS)):
        found = counted(stub, backend, inputs)
        assert (waits(found), "copy H2D pageable" in found) == (1, False)
        assert found["copy D2D"].largest <= BATCH * BEAMS * 512 * 4


def test_uploads_are_in_proportion(stub: Stub) -> None:
    backend = started(EN_DE, BATCH, BEAMS, 256)
    assert counted(stub, backend, sampled(BATCH, BEAMS))["copy H2D"].bytes <= 4096
    few, many = (counted(stub, backend, edited(BATCH, BEAMS, edits))["copy H2D"].bytes for edits in (4, 64))
    assert BATCH * BEAMS * 4 * 16 <= few <= BATCH * BEAMS * 4 * 16 + 2048
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
