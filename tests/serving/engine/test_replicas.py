"""Several engines, on as many devices or sharing one CPU: requests go to the least busy one, and it makes no
difference."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from beamline.serving.contract.stats import StepStats
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Result
from beamline.serving.engine.replicas import DeviceThreads, Replicas
from beamline.serving.engine.request import Request, deliver
from beamline.serving.errors import Cancelled, ModelError, Overloaded
from beamline.serving.models.engines import EngineSettings, Observe, engines_for, load_everywhere
from tests.support.engines import Answer, make_engine, results, served_by, step
from tests.support.marian_shape import MAX_LENGTH, MarianShape

BEAM = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=MAX_LENGTH)
LONG = replace(BEAM, min_length=MAX_LENGTH - 1)


def replicas(model: MarianShape, count: int, slots: int = 2, max_queue: int = 3) -> Replicas:
    """Emulated GPUs."""
    with served_by("tensorrt-ahead"):
        return Replicas([make_engine(model.folder, model.manifest, slots, max_queue=max_queue) for _ in range(count)])


def submit(served: Replicas, source: list[int], options: DecodingOptions = BEAM) -> tuple[Request, list[Answer]]:
    answers: list[Answer] = []
    request = Request(tuple(source), options, answers.append)
    served.submit(request)
    return request, answers


def finish(served: Replicas) -> None:
    while any(engine.busy for engine in served.engines):
        for engine in served.engines:
            if engine.busy:
                step(engine)


def test_requests_go_where_there_is_least_to_do(plain_model: MarianShape) -> None:
    served = replicas(plain_model, 3, max_queue=100)
    for number in range(6):
        submit(served, [5, 6, 7 + number], LONG)
    assert [engine.load for engine in served.engines] == [2, 2, 2]
    for _ in range(2):
        step(served.engines[0])
    deliver(served.engines[1].fail_everything(Cancelled("emptied")))
    for number in range(2):
        submit(served, [9, 10 + number], LONG)
    assert [engine.load for engine in served.engines] == [2, 2, 2]
    finish(served)


def test_answers_are_those_of_one_device(plain_model: MarianShape) -> None:
    served, alone = replicas(plain_model, 2, max_queue=100), replicas(plain_model, 1, max_queue=100)
    sources = [[5, 6, 7 + number] for number in range(8)]
    found = [submit(served, source)[1] for source in sources]
    expected = [submit(alone, source)[1] for source in sources]
    for each in (served, alone):
        finish(each)
    for mine, theirs in zip(found, expected, strict=True):
        assert results(mine)[0].hypotheses[0].tokens == results(theirs)[0].hypotheses[0].tokens


def test_a_full_device_is_passed_over_and_a_full_fleet_refuses(plain_model: MarianShape) -> None:
    served = replicas(plain_model, 2)
    for _ in range(6):
        submit(served, [5, 6], LONG)
    with pytest.raises(Overloaded):
        submit(served, [5, 6], LONG)
    finish(served)


def test_a_cancellation_reaches_whoever_has_the_request(plain_model: MarianShape) -> None:
    served = replicas(plain_model, 2)
    pairs = [submit(served, [5, 6, 7 + number], LONG) for number in range(4)]
    for engine in served.engines:
        step(engine)
    served.cancel(pairs[2][0].id)
    finish(served)
    assert isinstance(pairs[2][1][0], Cancelled)
    assert all(isinstance(answers[0], Result) for _, answers in (*pairs[:2], pairs[3]))


def test_every_device_has_a_thread(plain_model: MarianShape) -> None:
    """As the server drives them: added, drained, retired, stopped."""
    served = replicas(plain_model, 2, max_queue=100)
    threads = DeviceThreads(2)
    threads.add(served)
    threads.start()
    pairs = [submit(served, [5, 6, 7 + number]) for number in range(6)]
    assert threads.drain(60)
    assert all(isinstance(answers[0], Result) for _, answers in pairs)
    gone = threading.Event()
    threads.retire(served, gone.set)
    assert gone.wait(60)
    threads.stop()


# -- sharing the CPU ---------------------------------------------------------------------------------------------------


def loaded(model: MarianShape, observe: Observe = lambda step: None, **settings: Any) -> Engine | Replicas:
    return load_everywhere(model.folder, model.manifest, EngineSettings(warm_up=False, **settings), observe)


def test_engines_share_threads_slots_and_queue(plain_model: MarianShape) -> None:
    served = loaded(plain_model, threads=4, engines=2, slots=5, max_queue=3)
    assert isinstance(served, Replicas)
    assert [engine.plan.slots for engine in served.engines] == [3, 2]
    assert (served.plan.slots, served.plan.engines) == (5, 2)
    assert served.plan.describe(0, 0)[0].startswith("5 slots in 2 engines,")
    sessions = [engine._backend._session for engine in served.engines]  # type: ignore[attr-defined]
    assert [session.get_session_options().intra_op_num_threads for session in sessions] == [2, 2]
    for number in range(3):
        submit(served, [5, 6, 7 + number], LONG)
    with pytest.raises(Overloaded):
        submit(served, [5, 6], LONG)
    finish(served)


def test_a_queue_may_be_shorter_than_there_are_slots(plain_model: MarianShape) -> None:
    """Also while it is warmed up."""
    settings = EngineSettings(threads=1, slots=8, max_queue=1)
    served = load_everywhere(plain_model.folder, plain_model.manifest, settings, lambda step: None)
    assert isinstance(served, Engine)
    assert not served.busy


def test_their_answers_are_those_of_one_engine(plain_model: MarianShape) -> None:
    served, alone = loaded(plain_model, threads=2, engines=2), loaded(plain_model, threads=2, engines=1)
    assert isinstance(served, Replicas)
    assert isinstance(alone, Engine)
    sources = [[5, 6, 7 + number] for number in range(8)]
    found = [submit(served, source)[1] for source in sources]
    expected = [submit(Replicas([alone]), source)[1] for source in sources]
    finish(served)
    finish(Replicas([alone]))
    for mine, theirs in zip(found, expected, strict=True):
        assert results(mine)[0].hypotheses[0].tokens == results(theirs)[0].hypotheses[0].tokens


def test_no_engine_without_a_thread_and_a_slot(plain_model: MarianShape) -> None:
    with pytest.raises(ModelError, match="to have 3 engines, but there are 2 threads"):
        loaded(plain_model, threads=2, engines=3)
    with pytest.raises(ModelError, match="to have 2 engines, but there are 1 slots"):
        loaded(plain_model, threads=2, engines=2, slots=1)
    assert isinstance(loaded(plain_model, threads=2, slots=1), Engine)


@pytest.mark.parametrize(
    ("megabytes", "threads", "engines"), [(8, 1, 1), (8, 2, 2), (8, 3, 3), (8, 64, 4), (13, 2, 1), (500, 64, 1)]
)
def test_only_small_models_have_several(plain_model: MarianShape, megabytes: int, threads: int, engines: int) -> None:
    weights = plain_model.manifest.weights.model_copy(update={"bytes": megabytes * 2**20})
    assert engines_for(plain_model.manifest.model_copy(update={"weights": weights}), threads) == engines


def test_what_they_say_is_added_up(plain_model: MarianShape) -> None:
    steps: list[StepStats] = []
    served = loaded(plain_model, steps.append, threads=2, engines=2, slots=4)
    assert isinstance(served, Replicas)
    answers = [submit(served, [5, 6, 7 + number], LONG)[1] for number in range(8)]
    for engine in served.engines:
        step(engine)
    assert [(step.active, step.remaining, step.queued) for step in steps] == [(2, 2, 2), (2, 4, 4)]
    assert steps[1].live_entries == 2 * steps[0].live_entries
    finish(served)
    assert steps[-1].remaining == steps[-1].queued == steps[-1].live_entries == 0
    assert sum(len(step.finished) for step in steps) == len(answers)
