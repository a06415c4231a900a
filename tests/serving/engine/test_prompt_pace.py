"""How much of a prompt goes between two steps of those who decode already; on devices whose time is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from beamline.serving.backends.device import DeviceTensor
from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.contract.backend import PromptChunk, Shape
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.chunked_prefill import LARGEST_CHUNK, Pace
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece
from beamline.serving.engine.request import Request
from tests.support.emulated_device import EmulatedDevice
from tests.support.emulator import emulated_cuda_backend
from tests.support.engines import step
from tests.support.lm_requests import ENDLESS, GREEDY, prompt
from tests.support.tiny_lm import TinyModel

STEP = 0.030
PROMPT = 400


def chunk_seconds(tokens: int) -> float:
    """Reading the weights takes as long as ten tokens."""
    return 0.020 + 0.002 * tokens


class Timed(FakeBackend):
    """Steps and chunks take a time that nobody has to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.parts = Counter[str]()
        super().__init__(fake_manifest("fake-lm", "generate"), STEP, self._pass)

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def expect(self, shape: Shape) -> bool:
        return self._work("expected")

    def grow(self, memories: Sequence[list[int]], entries: int) -> bool:
        return not self._work("grown")

    def _work(self, what: str) -> bool:
        """There are ten parts of it, which take as long as a chunk."""
        self.parts[what] += 1
        if self.parts[what] <= 10:
            self._pass(chunk_seconds(4))
        return self.parts[what] <= 10

    def take_in(self, memories: Sequence[list[int]], chunk: PromptChunk) -> None:
        super().take_in(memories, chunk)
        self._pass(chunk_seconds(chunk.tokens.size))


def gaps_beside_a_prompt(slowdown: float) -> list[float]:
    """Of a stream, from when a long prompt comes until it gets its first token."""
    backend = Timed()
    plan = Plan.of(backend.manifest, slots=4)
    engine = Engine(backend.manifest, backend, plan, max_queue=10, prompt_slowdown=slowdown, clock=lambda: backend.now)

    def submit(length: int) -> list[float]:
        times: list[float] = []

        def take(output: Output) -> None:
            if isinstance(output, Piece):
                times.append(backend.now)

        options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=500)
        engine.submit(Request((5,) * length, options, take, streams=True))
        return times

    running = submit(490)  # what the fake writes is as long as its prompt
    while len(running) < 5:
        step(engine)
    late = submit(PROMPT)
    while not late:
        step(engine)
    return [after - before for before, after in pairwise(running[4:])]


@pytest.mark.parametrize("slowdown", [2.0, 2.3, 4.0, 8.0])
def test_a_gap_becomes_no_longer_than_was_said(slowdown: float) -> None:
    gaps = gaps_beside_a_prompt(slowdown)
    assert max(gaps) <= slowdown * STEP + 1e-9
    assert max(gaps) >= 0.8 * slowdown * STEP  # and what was allowed is used


def test_who_allows_more_has_prompts_sooner() -> None:
    times = [sum(gaps_beside_a_prompt(slowdown)) for slowdown in (2.0, 4.0, 8.0)]
    assert times[0] > times[1] > times[2]


def test_a_prompt_gets_on_even_where_no_slowdown_is_allowed() -> None:
    gaps = gaps_beside_a_prompt(1.0)
    assert max(gaps) == pytest.approx(STEP + chunk_seconds(4))
    assert len(gaps) >= (PROMPT - 1) // 4


def test_where_nobody_waits_a_chunk_is_as_large_as_can_be() -> None:
    pace = Pace(2.0)
    assert pace.tokens(others_wait=False) == LARGEST_CHUNK
    assert pace.tokens(others_wait=True) < LARGEST_CHUNK


def test_a_chunk_that_was_larger_because_nobody_waited_lets_none_be_larger_later() -> None:
    pace = Pace(2.0)
    pace.stepped(STEP)
    pace.took(4, chunk_seconds(4))
    allowed = pace.tokens(others_wait=True)
    pace.took(LARGEST_CHUNK, chunk_seconds(LARGEST_CHUNK))
    assert pace.tokens(others_wait=True) == allowed


def test_the_rest_of_a_prompt_makes_the_next_one_s_chunks_no_smaller() -> None:
    pace = Pace(8.0)
    pace.stepped(STEP)
    for _ in range(10):
        tokens = pace.tokens(others_wait=True)
        pace.took(tokens, chunk_seconds(tokens))
    pace.took(3, chunk_seconds(3))
    assert pace.tokens(others_wait=True) == tokens
    pace.took(40, 10 * chunk_seconds(40))  # unless even that took too long
    assert pace.tokens(others_wait=True) < 40


class TimedGpu(EmulatedDevice):
    """The host goes on while it works, and sees how late it is only when it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.host = 0.0  # on either clock
        self.clock = lambda: self.now
        self.steps: list[float] = []  # when each was over

    def _ask(self, work: Callable[[], object]) -> None:
        asked = self.host

        def when_asked() -> None:
            self.now = max(self.now, asked)
            work()

        super()._ask(when_asked)

    def wait(self, mark: int) -> None:
        super().wait(mark)
        self.host = max(self.host, self.now)

    def work(self, graph: str, seconds: float) -> None:
        def take_time() -> None:
            self.now += seconds
            if graph == "step":
                self.steps.append(self.now)

        self.launch(take_time)


def on_a_gpu(model: TinyModel, slowdown: float) -> tuple[Engine, TimedGpu]:
    """Asking for a chunk takes the host a millisecond, however long that is."""
    device = TimedGpu()
    backend = emulated_cuda_backend(model.folder, model.manifest, device)
    prepare = backend._runner.prepare

    def timed(graph: str, tensors: Mapping[str, DeviceTensor], keep: bool = False) -> Callable[[], None]:
        call, seconds = prepare(graph, tensors, keep), STEP
        if graph == "prefill":
            seconds = chunk_seconds(prod(tensors["tokens"].shape))
            device.host += 0.001

        def call_and_take_time() -> None:
            call()
            device.work(graph, seconds)

        return call_and_take_time

    backend._runner.prepare = timed  # type: ignore[method-assign]
    plan = Plan.of(model.manifest, slots=4)
    engine = Engine(model.manifest, backend, plan, max_queue=10, prompt_slowdown=slowdown, clock=lambda: device.host)
    return engine, device


def gaps_on_a_gpu(model: TinyModel, slowdown: float, first: int = 4) -> list[float]:
    """Between the ends of a stream's steps, from when a long prompt comes until it gets its first token."""
    engine, device = on_a_gpu(model, slowdown)

    def submit(source: tuple[int, ...], options: DecodingOptions) -> list[Output]:
        outputs: list[Output] = []
        engine.submit(Request(source, options, outputs.append, streams=True))
        return outputs

    running = submit(prompt(first), replace(ENDLESS, max_length=110, min_length=110))
    while len(running) < 5:
        step(engine)
    began = len(device.steps)
    late = submit(prompt(PROMPT), GREEDY)
    while not late:
        step(engine)
    return [after - before for before, after in pairwise(device.steps[began - 1 :])]


@pytest.mark.parametrize("first", [4, 400])
@pytest.mark.parametrize("slowdown", [2.0, 4.0, 8.0])
def test_on_a_gpu_too_a_gap_becomes_no_longer_than_was_said(tiny_lm: TinyModel, slowdown: float, first: int) -> None:
    """Though the host learns of a chunk's time only a step later, by the device's clock; and though the stream's own
    prompt, before which nobody waited, was one large chunk."""
    gaps = gaps_on_a_gpu(tiny_lm, slowdown, first)
    assert 0.8 * slowdown * STEP <= max(gaps) <= slowdown * STEP + 1e-9
