"""How much of a prompt goes between two steps of those who decode already; on a device whose time is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.contract.backend import PromptChunk, Shape
from beamline.serving.engine.chunked_prefill import LARGEST_CHUNK, Pace
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece
from beamline.serving.engine.plan import Plan
from beamline.serving.engine.request import Request
from tests.support.engines import step

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
