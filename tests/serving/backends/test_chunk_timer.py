"""How long chunks of prompts take on a GPU: known without a wait of its own, and every event goes back."""

from __future__ import annotations

import gc

import pytest

from beamline.serving.backends import chunk_timer
from beamline.serving.backends.chunk_timer import ChunkTimer
from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.backends.probe import probe
from beamline.serving.errors import OutOfMemory
from tests.support.cuda_driver import EmulatedCuda

pytestmark = pytest.mark.skipif(bool(probe().devices), reason="there is a GPU, and calls to CUDA would do something")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    """Its clock counts how often it was read: once for every timed mark that is reached."""
    emulated = EmulatedCuda()
    reads = iter(range(1000))
    emulated.device.clock = lambda: float(next(reads))
    monkeypatch.setattr("cuda.bindings.driver", emulated)
    return emulated


def test_chunks_are_known_when_a_later_step_was_waited_for(cuda: EmulatedCuda) -> None:
    device = CudaDevice(0)
    timer = ChunkTimer(device)
    with timer.measure(4):
        pass
    asked, step = timer.asked, device.mark()
    with timer.measure(8):
        pass
    device.wait(step)
    timer.reached(asked)
    assert [(each.tokens, each.seconds) for each in timer.take()] == [(4, 1.0)]
    assert timer.take() == ()
    device.wait(device.mark())
    timer.reached(timer.asked)
    assert [(each.tokens, each.seconds) for each in timer.take()] == [(8, 1.0)]
    assert device.waits == 2


def test_of_many_chunks_that_no_step_follows_the_last_are_measured(cuda: EmulatedCuda) -> None:
    """With no more events than those need."""
    device = CudaDevice(0)
    timer = ChunkTimer(device)
    for tokens in range(100):
        with timer.measure(tokens):
            pass
    device.wait(device.mark())
    timer.reached(timer.asked)
    assert [each.tokens for each in timer.take()] == list(range(100 - chunk_timer._MOST, 100))
    assert cuda.calls.count("cuEventCreate") <= 2 * (chunk_timer._MOST + 1) + 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_event_stays_behind(cuda: EmulatedCuda, fails: bool) -> None:
    """Also of a chunk that failed, or behind which no step came before the model was unloaded."""
    device = CudaDevice(0)
    timer = ChunkTimer(device)
    with timer.measure(4):
        pass
    if fails:
        with pytest.raises(OutOfMemory), timer.measure(4):
            raise OutOfMemory("injected")
    assert cuda.events == (3 if fails else 2)
    del timer, device
    gc.collect()
    assert cuda.events == 0
