"""The engine of models that read: what waits together runs together, and nobody suffers from a neighbour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from beamline.serving.contract.backend import Floats
from beamline.serving.contract.manifest import File, PooledManifest, Weights
from beamline.serving.contract.stats import Outcome, StepStats
from beamline.serving.engine.outputs import Output, Pooled
from beamline.serving.engine.pooled import RUN_TOKENS, PooledEngine
from beamline.serving.engine.request import Request, deliver
from beamline.serving.errors import Cancelled, ComputeError, DeadlinePassed, Overloaded, ShuttingDown

NOTHING = File(file="none", sha256="")
POISON, BOMB = 666, 999


def manifest() -> PooledManifest:
    return PooledManifest(
        name="mood",
        version=1,
        task="embed",
        family="fake",
        graph=NOTHING,
        weights=Weights(file="none", sha256="", bytes=0),
        tokenizer=NOTHING,
        vocabulary_size=1000,
        pad_id=0,
        max_source_length=5000,
        poolings=("mean",),
        width=1,
    )


class Backend:
    """The mean of the ids; one id is not a number, another one an exception for all."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def run(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
        self.runs.append(len(sources))
        if any(BOMB in source for source in sources):
            raise RuntimeError("bang")
        means = [np.nan if POISON in source else sum(source) / len(source) for source in sources]
        return {"vector_mean": np.array(means, np.float32)[:, None]}


class Bench:
    def __init__(self, rows: int = 4, max_queue: int = 100) -> None:
        self.now = 0.0
        self.stats: list[StepStats] = []
        self.backend = Backend()
        self.answers: dict[int, Pooled | Exception] = {}
        self.engine = PooledEngine(
            manifest(), self.backend, rows=rows, max_queue=max_queue, observe=self.stats.append, clock=lambda: self.now
        )

    def submit(self, number: int, source: Sequence[int] = (1, 3), **more: float) -> Request:
        def take(answer: Output) -> None:
            assert number not in self.answers, "answered twice"
            assert isinstance(answer, Pooled | Exception)
            self.answers[number] = answer

        request = Request(tuple(source), on_output=take, **more)  # type: ignore[arg-type]
        self.engine.submit(request)
        return request

    def step(self) -> None:
        deliver(self.engine.step())

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def mean(self, number: int) -> float:
        answer = self.answers[number]
        assert isinstance(answer, Pooled), answer
        return float(answer.outputs["vector_mean"][0])


def test_those_who_wait_together_run_together() -> None:
    bench = Bench(rows=4)
    for number in range(10):
        bench.submit(number, [number, number + 2])
    bench.run()
    assert bench.backend.runs == [4, 4, 2]
    assert [bench.mean(number) for number in range(10)] == [number + 1 for number in range(10)]
    assert [stats.active for stats in bench.stats] == [4, 4, 2]
    assert [stats.queued for stats in bench.stats] == [6, 2, 0]


def test_a_run_has_a_limit_of_tokens_but_takes_at_least_one() -> None:
    bench = Bench(rows=100)
    bench.submit(0, [1] * (RUN_TOKENS + 1))
    bench.submit(1, [1] * (RUN_TOKENS // 2))
    bench.submit(2, [1] * (RUN_TOKENS // 2))
    bench.submit(3, [1])
    bench.run()
    assert [stats.admitted for stats in bench.stats] == [1, 2, 1]


def test_very_different_lengths_are_not_padded_to_each_other() -> None:
    bench = Bench(rows=10)
    for number, length in enumerate((3, 400, 5, 390)):
        bench.submit(number, [7] * length)
    bench.run()
    assert bench.backend.runs == [2, 2]


@pytest.mark.parametrize("culprit", [POISON, BOMB])
def test_a_poisoned_request_fails_alone(culprit: int) -> None:
    bench = Bench()
    for number in range(3):
        bench.submit(number, [culprit if number == 1 else 4, 8])
    bench.run()
    assert isinstance(bench.answers[1], ComputeError)
    assert (bench.mean(0), bench.mean(2)) == (6, 6)
    outcomes = [finished.outcome for stats in bench.stats for finished in stats.finished]
    assert sorted(outcomes) == [Outcome.FAILED, Outcome.OK, Outcome.OK]


def test_the_queue_has_an_end() -> None:
    bench = Bench(max_queue=2)
    bench.submit(0)
    bench.submit(1)
    with pytest.raises(Overloaded, match="queue of mood is full"):
        bench.submit(2)
    bench.step()
    bench.submit(3)
    bench.run()
    assert sorted(bench.answers) == [0, 1, 3]


def test_cancelled_and_late_requests_are_not_computed() -> None:
    bench = Bench()
    cancelled = bench.submit(0)
    bench.submit(1, deadline=5.0)
    bench.submit(2, queue_deadline=5.0)
    bench.submit(3)
    bench.engine.cancel(cancelled.id)
    bench.now = 6.0
    bench.run()
    assert isinstance(bench.answers[0], Cancelled)
    assert isinstance(bench.answers[1], DeadlinePassed)
    assert isinstance(bench.answers[2], Overloaded)
    assert bench.mean(3) == 2
    assert bench.backend.runs == [1]


def test_the_urgent_go_first() -> None:
    bench = Bench(rows=1)
    bench.submit(0, priority=3)
    bench.submit(1, priority=0)
    bench.step()
    assert list(bench.answers) == [1]


def test_draining_and_failing() -> None:
    bench = Bench()
    bench.submit(0)
    bench.engine.drain()
    with pytest.raises(ShuttingDown):
        bench.submit(1)
    deliver(bench.engine.fail_everything(ShuttingDown("gone")))
    assert isinstance(bench.answers[0], ShuttingDown)
    assert not bench.engine.busy
