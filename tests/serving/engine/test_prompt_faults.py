"""Prompts that fail together after some of those who sent them have left: nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import pytest

from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.contract.backend import PromptChunk
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.chunked_prefill import ChunkedPrefill
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.request import Request, deliver
from beamline.serving.errors import Cancelled, ComputeError, OutOfMemory, ShuttingDown
from tests.support.engines import step


class Memory(list[int]):
    """A list that can be counted."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Device(FakeBackend):
    """It fails when it is told to, and knows which memories are alive."""

    def __init__(self) -> None:
        super().__init__(fake_manifest("fake-lm", "generate"), 0.0)
        self.alive: WeakSet[Memory] = WeakSet()
        self.most = 100
        self.open_fails: Callable[[Sequence[int]], bool] = lambda lengths: False
        self.chunk_fails: Callable[[PromptChunk], bool] = lambda chunk: False

    def prompts(self, lengths: Sequence[int], known: Sequence[tuple[list[int], int] | None]) -> list[list[int]]:
        if self.open_fails(lengths):
            raise RuntimeError("injected")
        if len(self.alive) + len(lengths) > self.most:
            raise OutOfMemory("injected")
        made = [Memory(memory) for memory in super().prompts(lengths, known)]
        self.alive.update(made)
        return [*made]

    def take_in(self, memories: Sequence[list[int]], chunk: PromptChunk) -> None:
        rows = list(memories)
        if self.chunk_fails(chunk):
            raise RuntimeError("injected")
        super().take_in(rows, chunk)


class Bench:
    def __init__(self) -> None:
        self.device = Device()
        plan = Plan.of(self.device.manifest, 8)
        self.engine = Engine(self.device.manifest, self.device, plan, max_queue=100, clock=lambda: 0.0)
        self.answers: dict[int, Output] = {}

    def submit(self, first: int, length: int) -> int:
        def take(output: Output) -> None:
            assert request.id not in self.answers, "answered twice"
            self.answers[request.id] = output

        options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=300)
        request = Request((first,) * length, options, take)
        self.engine.submit(request)
        return request.id

    def step(self) -> None:
        step(self.engine)

    def finish(self) -> None:
        while self.engine.busy:
            self.step()


def test_a_prompt_that_was_cancelled_can_fail_with_its_group() -> None:
    """Also where it could not even begin anew."""
    bench = Bench()
    prompts = [bench.submit(first, length) for first, length in ((6, 300), (7, 310), (8, 320))]
    bench.step()  # a chunk is not enough for them
    assert len(bench.device.alive) == 3
    bench.engine.cancel(prompts[1])
    bench.device.chunk_fails = lambda chunk: len(chunk.tokens) > 1
    bench.device.open_fails = lambda lengths: list(lengths) == [309]
    bench.finish()
    assert isinstance(bench.answers[prompts[1]], Cancelled)
    for number in (prompts[0], prompts[2]):
        assert isinstance(bench.answers[number], Result)


def test_a_part_of_a_group_has_somebody_who_is_still_here() -> None:
    """While others decode, prompts that came together go apart; the first of them may have left."""
    bench = Bench()
    running = bench.submit(5, 200)
    bench.step()
    prompts = [bench.submit(first, 60) for first in (6, 7, 8)]
    bench.step()
    assert len(bench.engine._scheduler.active) == 1
    bench.engine.cancel(prompts[1])
    bench.device.chunk_fails = lambda chunk: bool((chunk.tokens == 7).any())
    bench.finish()
    assert isinstance(bench.answers[prompts[1]], Cancelled)
    for number in (running, prompts[0], prompts[2]):
        assert isinstance(bench.answers[number], Result)


def test_prompts_that_failed_together_begin_anew_in_the_memory_that_they_had() -> None:
    bench = Bench()
    bench.device.most = 3
    bench.device.chunk_fails = lambda chunk: len(chunk.tokens) > 1 or bool((chunk.tokens == 7).any())
    prompts = [bench.submit(first, 60) for first in (6, 7, 8)]
    bench.finish()
    assert isinstance(bench.answers[prompts[1]], ComputeError)
    for number in (prompts[0], prompts[2]):
        assert isinstance(bench.answers[number], Result)


@pytest.mark.parametrize("how", ["fail_everything", "abandon"])
@pytest.mark.parametrize("complete", [False, True])
def test_an_engine_whose_requests_have_failed_keeps_nothing_of_them(how: str, complete: bool) -> None:
    """Though it may have no step for a long time."""
    bench = Bench()
    bench.submit(5, 200)
    bench.step()
    prompts = [bench.submit(6, 60), bench.submit(7, 20)]
    bench.step()
    prefill = bench.engine._prefill
    assert isinstance(prefill, ChunkedPrefill)
    while complete and not prefill._complete:
        bench.step()
    assert bench.device.alive
    deliver(getattr(bench.engine, how)(ShuttingDown("over")))
    assert all(isinstance(bench.answers[number], ShuttingDown) for number in prompts)
    assert not bench.device.alive
