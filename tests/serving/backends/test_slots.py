"""What CPU and GPU share: memory of prompts, who owns it, and what is kept of it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.backends.host import HostMemory
from beamline.serving.backends.slots import Memory, SlotBackend
from beamline.serving.contract.backend import PromptChunk
from tests.support.emulated_device import EmulatedDevice
from tests.support.emulator import emulated_cuda_backend
from tests.support.tiny_lm import TinyModel

LENGTH = 40


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest, tiny_lm: TinyModel) -> SlotBackend:
    if request.param == "cpu":
        return CpuBackend(tiny_lm.folder, tiny_lm.manifest, threads=1)
    return emulated_cuda_backend(tiny_lm.folder, tiny_lm.manifest)


def prefilled(backend: SlotBackend, rows: int) -> list[Memory]:
    memories = backend.prompts([LENGTH] * rows, [None] * rows)
    while not backend.grow(memories, LENGTH):
        pass
    tokens = np.arange(3, 3 + rows * LENGTH).reshape(rows, LENGTH) % 50
    backend.take_in(memories, PromptChunk(tokens, np.zeros(rows, np.int64)))
    return memories


def entries(backend: SlotBackend, memory: Memory, length: int) -> list[NDArray[Any]]:
    """Of each cache: [heads, length, width]."""
    device: Any = backend._device
    found = []
    for tensor in memory.entries.values():
        if isinstance(device, EmulatedDevice):
            view = device.view(tensor.address, tensor.dtype, tensor.shape)
        else:
            view = HostMemory.view(tensor)
        found.append(view[memory.row, :, :length].copy())
    return found


def addresses(memory: Memory) -> list[int]:
    return [tensor.address for tensor in memory.entries.values()]


def test_a_prefix_shares_the_memory_of_a_prompt_that_was_alone(backend: SlotBackend) -> None:
    (memory,) = prefilled(backend, 1)
    kept, nbytes = backend.prefix(memory, LENGTH - 1)
    assert addresses(kept) == addresses(memory)
    assert (kept.length, nbytes) == (LENGTH - 1, sum(tensor.nbytes for tensor in kept.entries.values()))


@pytest.mark.parametrize(("rows", "length"), [(3, LENGTH), (1, 10)])
def test_a_prefix_is_copied_where_others_or_much_more_lie_with_it(backend: SlotBackend, rows: int, length: int) -> None:
    memory = prefilled(backend, rows)[-1]
    kept, nbytes = backend.prefix(memory, length)
    assert set(addresses(kept)).isdisjoint(addresses(memory))
    assert nbytes == sum(tensor.nbytes * length // tensor.shape[2] // rows for tensor in memory.entries.values())
    for mine, theirs in zip(entries(backend, kept, length), entries(backend, memory, length), strict=True):
        assert mine.any()
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("rows", "length"), [(3, LENGTH), (3, 10), (1, 10), (1, LENGTH - 1), (1, 1)])
def test_what_a_prefix_takes_is_known_before_it_is_made(backend: SlotBackend, rows: int, length: int) -> None:
    memory = prefilled(backend, rows)[-1]
    before = backend.prefix_bytes(memory, length)
    assert before == backend.prefix(memory, length)[1]


def test_a_shorter_beginning_of_what_is_kept_is_enough(backend: SlotBackend) -> None:
    memory = prefilled(backend, 1)[0]
    (continued,) = backend.prompts([LENGTH], [(memory, 7)])
    while not backend.grow([continued], LENGTH):
        pass
    for mine, theirs in zip(entries(backend, continued, 7), entries(backend, memory, 7), strict=True):
        assert mine.any()
        np.testing.assert_array_equal(mine, theirs)


def test_what_is_known_lives_until_it_is_copied(backend: SlotBackend) -> None:
    """A kept prefix may be dropped by the prefix cache while a prompt that begins with it waits for its memory."""
    memory = prefilled(backend, 2)[1]
    kept, _ = backend.prefix(memory, 30)
    expected = entries(backend, kept, 30)
    (continued,) = backend.prompts([LENGTH], [(kept, 30)])
    del memory, kept
    gc.collect()
    while not backend.grow([continued], LENGTH):
        pass
    for mine, theirs in zip(entries(backend, continued, 30), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_memory_of_prompts_is_freed_with_them(tiny_lm: TinyModel) -> None:
    backend = CpuBackend(tiny_lm.folder, tiny_lm.manifest, threads=1)
    memories = prefilled(backend, 2)
    kept, _ = backend.prefix(memories[0], LENGTH)
    assert len(backend._host._allocated) == 2 * len(memories[0].entries)
    del memories
    assert len(backend._host._allocated) == len(kept.entries)
    del kept
    assert not backend._host._allocated
