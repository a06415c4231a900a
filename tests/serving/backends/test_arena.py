"""State tensors in the host's memory and in an emulated GPU's, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.serving.backends.arena import Arena
from beamline.serving.backends.device import Device, DeviceTensor, TensorSpec
from beamline.serving.backends.host import HostMemory, tensor_of
from beamline.serving.errors import ModelError
from tests.support.emulated_device import EmulatedDevice

DEVICES = (HostMemory, EmulatedDevice)
CACHE = TensorSpec("t", "float32", ("B", 2, "C", 3))


def view(arena: Arena, device: Device) -> NDArray[Any]:
    """What it holds: [slots, ...]."""
    tensor = arena.tensor(arena.slots)
    if isinstance(device, EmulatedDevice):
        return device.view(tensor.address, tensor.dtype, tensor.shape)
    return HostMemory.view(tensor)


def uploaded(device: Device, values: NDArray[Any]) -> DeviceTensor:
    address = device.allocate(values.nbytes)
    device.upload(address, values)
    return DeviceTensor(address, str(values.dtype), values.shape)


def test_the_last_entries_of_a_slot_are_wiped_alone() -> None:
    device = EmulatedDevice()
    arena = Arena(CACHE, 3, {"C": 8}, device, masked=True)
    view(arena, device)[...] = 1
    arena.clear_last(1, 2)
    expected = np.ones((3, 2, 8, 3), np.float32)
    expected[1, :, 6:] = 0
    np.testing.assert_array_equal(view(arena, device), expected)


lengths = st.integers(1, 16)


@settings(max_examples=200)
@given(
    st.sampled_from(DEVICES),
    st.booleans(),
    st.lists(st.tuples(lengths, st.integers(0, 4)), min_size=1, max_size=8),
)
def test_layouts_keep_what_both_have(
    kind: type[HostMemory] | type[EmulatedDevice], masked: bool, changes: list[tuple[int, int]]
) -> None:
    """Growing and shrinking never mixes rows, and what is new is zero; in a cache, where nobody looks, it is finite."""
    device = kind()
    arena = Arena(CACHE, 4, {"C": 16}, device, masked=masked)
    arena.resize({"C": 8}, 0)
    random = np.random.default_rng(0)
    now = view(arena, device)
    expected = np.zeros_like(now)
    expected[...] = now[...] = random.random(now.shape, np.float32)
    kept = 4
    for length, rows in changes:
        kept = min(kept, rows)
        arena.resize({"C": length}, kept)
        now = view(arena, device)
        grown = np.zeros((4, 2, length, 3), np.float32)
        common = min(length, expected.shape[2])
        grown[:kept, :, :common] = expected[:kept, :, :common]
        assert np.isfinite(now).all()
        if masked:
            np.testing.assert_array_equal(now[:kept, :, :common], grown[:kept, :, :common])
            grown[...] = now
        np.testing.assert_array_equal(now[:kept], grown[:kept])
        expected = grown


@settings(max_examples=200)
@given(st.sampled_from(DEVICES), st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6))
def test_two_axes_change_at_once(kind: type[HostMemory] | type[EmulatedDevice], changes: list[tuple[int, int]]) -> None:
    """As of an ancestry when the batch gets a wider beam and a shorter cache; empty places hold what was asked for."""
    device = kind()
    fill = np.array(7, np.int64)
    arena = Arena(TensorSpec("t", "int64", ("B", "K", "C")), 3, {"K": 16, "C": 16}, device, fill)
    arena.resize({"K": 4, "C": 5}, 0)
    expected = np.arange(60).reshape(3, 4, 5)
    for slot in range(3):
        arena.write(slot, expected[slot])
    for beams, length in changes:
        arena.resize({"K": beams, "C": length}, 3)
        grown = np.full((3, beams, length), 7)
        common = (slice(None), slice(min(beams, expected.shape[1])), slice(min(length, expected.shape[2])))
        grown[common] = expected[common]
        np.testing.assert_array_equal(view(arena, device), grown)
        expected = grown


@settings(max_examples=100)
@given(st.sampled_from(DEVICES), st.booleans(), st.sets(st.integers(0, 15)))
def test_kept_entries_stand_at_the_beginning(
    kind: type[HostMemory] | type[EmulatedDevice], masked: bool, entries: set[int]
) -> None:
    device = kind()
    arena = Arena(CACHE, 2, {"C": 16}, device, masked=masked)
    before = np.random.default_rng(0).random((2, 2, 16, 3), np.float32)
    for slot in range(2):
        arena.write(slot, before[slot])
    keep = sorted(entries)
    stay = next((place for place, entry in enumerate(keep) if place != entry), len(keep))
    arena.keep(1, np.array(keep, np.int64), stay)
    now = view(arena, device)
    np.testing.assert_array_equal(now[1, :, : len(keep)], before[1][:, keep])
    np.testing.assert_array_equal(now[0], before[0])
    assert masked or not now[1, :, len(keep) :].any()


@pytest.mark.parametrize("kind", DEVICES)
def test_rows_are_taken_from_longer_tensors(kind: type[HostMemory] | type[EmulatedDevice]) -> None:
    device = kind()
    arena = Arena(CACHE, 2, {"C": 8}, device)
    values = np.random.default_rng(0).random((3, 2, 20, 3), np.float32)
    assert arena.take(1, uploaded(device, values), 2, 5) == 5 * 2 * 3 * 4
    now = view(arena, device)
    np.testing.assert_array_equal(now[1, :, :5], values[2, :, :5])
    assert not now[1, :, 5:].any()
    assert not now[0].any()


@pytest.mark.parametrize("kind", DEVICES)
def test_a_square_of_source_positions_is_cut_on_both_sides(kind: type[HostMemory] | type[EmulatedDevice]) -> None:
    device = kind()
    arena = Arena(TensorSpec("t", "float32", ("B", "S", "S")), 2, {"S": 6}, device)
    values = np.random.default_rng(0).random((2, 5, 5), np.float32)
    arena.take(0, uploaded(device, values), 1, 3)
    now = view(arena, device)
    np.testing.assert_array_equal(now[0, :3, :3], values[1, :3, :3])
    assert np.count_nonzero(now) == 9


def test_axes_that_can_not_be_laid_out_are_refused() -> None:
    with pytest.raises(ModelError, match="can't be laid out anew"):
        Arena(TensorSpec("t", "float32", ("B", 2, "K", "C")), 1, {"K": 1, "C": 1}, HostMemory())


def test_memory_of_the_host_goes_with_its_arena() -> None:
    device = HostMemory()
    arena = Arena(CACHE, 2, {"C": 8}, device, fill=np.array(-1, np.float32))
    assert len(device._allocated) == 2
    del arena
    assert device._allocated == {}


def test_pages_are_taken_a_part_at_a_time() -> None:
    """No more than a step of these sizes uses, and none of them twice."""
    device = HostMemory()
    arena = Arena(TensorSpec("t", "float32", ("B", "C")), 64, {"C": 1024}, device)
    assert parts(arena, {"B": 4, "C": 1024}, 8192) == [8192, 8192]
    assert parts(arena, {"B": 5, "C": 1024}, 8192) == [4096]
    assert parts(arena, {"B": 64, "C": 1024}, 1 << 30) == [59 * 4096]


def parts(arena: Arena, sizes: dict[str, int], most: int) -> list[int]:
    def given() -> Iterator[int]:
        while nbytes := arena.populate(sizes, most):
            yield nbytes

    return list(given())


def test_an_array_is_found_by_its_address() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    np.testing.assert_array_equal(HostMemory.view(tensor_of(values)), values)
