"""The thread that drives engines: they come and go between two steps, and nothing keeps one that is gone."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Never, cast

import pytest

from beamline.serving.contract.backend import StepInputs, StepOutputs
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.pooled import PooledEngine
from beamline.serving.engine.request import Request
from beamline.serving.engine.thread import EngineThread, FairShare
from beamline.serving.errors import ComputeError, DeviceLost, ShuttingDown
from beamline.serving.models.engines import FakeSettings, fake_engine
from tests.serving.engine.test_pooled import manifest as pooled_manifest

WAIT = 120  # seconds; only ever used up by a failure


def engine() -> Engine:
    return fake_engine(FakeSettings(slots=2), lambda stats: None)


def ask(target: Engine, length: int) -> queue.SimpleQueue[Output]:
    answers: queue.SimpleQueue[Output] = queue.SimpleQueue()
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=length + 2)

    def take(answer: Output, engine: Engine = target) -> None:  # as a call does, it knows its engine
        answers.put(answer)

    target.submit(Request((*[7] * length, 2), options, take))
    return answers


def test_an_engine_that_is_retired_finishes_and_nothing_keeps_it() -> None:
    thread = EngineThread()
    thread.start()
    try:
        old, new = engine(), engine()
        thread.add(old)
        running = [ask(old, 60) for _ in range(4)]  # two in slots, two that wait and are encoded along
        thread.add(new)
        gone = threading.Event()
        thread.retire(old, gone.set)
        with pytest.raises(ShuttingDown):
            ask(old, 1)
        assert isinstance(ask(new, 3).get(timeout=WAIT), Result)
        assert all(isinstance(answers.get(timeout=WAIT), Result) for answers in running)
        assert gone.wait(WAIT)
        alive = weakref.ref(old)
        del old
        assert alive() is None  # at once, without a garbage collection: its memory is large
        assert isinstance(ask(new, 3).get(timeout=WAIT), Result)
    finally:
        thread.stop()


def test_an_idle_engine_leaves_at_once() -> None:
    thread = EngineThread([engine()])
    thread.start()
    try:
        idle, gone = engine(), threading.Event()
        thread.add(idle)
        thread.retire(idle, gone.set)
        assert gone.wait(WAIT)
        assert thread.drain(WAIT)
    finally:
        thread.stop()


def test_an_engine_that_loses_its_device_answers_everyone_and_the_others_go_on() -> None:
    broken, other = engine(), engine()
    thread = EngineThread([broken, other])

    def lost(*arguments: object) -> Never:
        raise RuntimeError("device lost")

    device: Any = broken._backend
    device.run = device.zero = lost
    assert thread.trouble(60) is None
    answers = [ask(broken, 5) for _ in range(4)]  # two in slots, two that wait
    thread.start()
    try:
        found = [each.get(timeout=WAIT) for each in answers]
        assert {type(answer) for answer in found} <= {ShuttingDown, ComputeError}
        assert any(isinstance(answer, ShuttingDown) for answer in found)
        with pytest.raises(ShuttingDown):
            ask(broken, 1)
        assert isinstance(ask(other, 3).get(timeout=WAIT), Result)
        assert thread.trouble(60) == "the device of fake is lost"
    finally:
        thread.stop()


def test_a_pooled_model_that_loses_its_device_says_so() -> None:
    """Nothing but its runs touches the device: whoever fails its requests does not notice."""

    class Lost:
        def run(self, sources: Sequence[Sequence[int]]) -> Never:
            raise DeviceLost("GPU 0 is gone")

    pooled = PooledEngine(pooled_manifest(), Lost(), rows=2, max_queue=10)
    thread = EngineThread([pooled])
    answers: list[Output] = []
    for _ in range(3):  # one more than a run has
        pooled.submit(Request((1, 3), on_output=answers.append))
    assert thread._turn()
    assert [type(answer) for answer in answers] == [ShuttingDown] * 3
    with pytest.raises(ShuttingDown):
        pooled.submit(Request((1, 3), on_output=answers.append))
    assert thread.trouble(60) == "the device of mood is lost"
    assert not thread._turn()


def test_a_step_that_does_not_end_is_trouble() -> None:
    begun, go_on = threading.Event(), threading.Event()
    slow = engine()
    run = slow._backend.run

    def gated(inputs: StepInputs) -> StepOutputs:
        begun.set()
        assert go_on.wait(WAIT)
        return run(inputs)

    slow._backend.run = gated  # type: ignore[method-assign]
    thread = EngineThread([slow])
    answers = ask(slow, 3)
    thread.start()
    try:
        assert begun.wait(WAIT)
        assert thread.trouble(0.0) == "a step has not ended for 0 seconds"
        assert thread.trouble(WAIT) is None
        go_on.set()
        assert isinstance(answers.get(timeout=WAIT), Result)
    finally:
        go_on.set()
        thread.stop()


def test_a_thread_that_ends_unasked_answers_everybody_and_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, busy: object) -> Never:
        raise KeyError("whose turn it is")

    monkeypatch.setattr(FairShare, "next", fails)
    alone = engine()
    thread = EngineThread([alone])
    assert thread.trouble(60) is None  # it was not started yet
    answers = ask(alone, 3)
    thread.start()
    assert isinstance(answers.get(timeout=WAIT), ShuttingDown)
    thread._thread.join(WAIT)
    assert thread.trouble(60) == "the engine's thread has ended"
    with pytest.raises(ShuttingDown):
        ask(alone, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_gone_without_a_word_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(self: object) -> Never:
        raise SystemExit

    monkeypatch.setattr(EngineThread, "_turn", leaves)
    thread = EngineThread([engine()])
    thread.start()
    thread._thread.join(WAIT)
    assert thread.trouble(60) == "the engine's thread has ended"


def test_a_thread_that_was_stopped_is_no_trouble() -> None:
    thread = EngineThread([engine()])
    thread.start()
    thread.stop()
    assert thread.trouble(60) is None


def test_a_callback_that_fails_does_not_end_the_thread() -> None:
    first, second = engine(), engine()
    thread = EngineThread([first, second])
    thread.start()
    try:

        def fails() -> Never:
            raise RuntimeError("the loop is closed")

        gone = threading.Event()
        thread.retire(first, fails)
        thread.retire(second, gone.set)
        assert gone.wait(WAIT)
        new = engine()
        thread.add(new)
        assert isinstance(ask(new, 3).get(timeout=WAIT), Result)
    finally:
        thread.stop()


def ask_for_scores(target: Engine) -> queue.SimpleQueue[Output]:
    answers: queue.SimpleQueue[Output] = queue.SimpleQueue()
    target.submit(Request((7, 2), on_output=lambda answer: answers.put(answer), target=(7, 2), labels=(7, 2)))
    return answers


@pytest.mark.parametrize("call", ["score_batch", "move", "place"])
def test_whichever_call_loses_the_device_everybody_is_answered(call: str) -> None:
    """Also those who have just left the queue, or their slot."""
    broken = engine()
    thread = EngineThread([broken])
    device: Any = broken._backend

    def lost(*arguments: object) -> Never:
        for each in ("run", "move", "zero", "place", "score_batch"):
            setattr(device, each, lost)
        raise DeviceLost("GPU 0 is gone")

    setattr(device, call, lost)
    answers = [ask(broken, 3), ask(broken, 9), ask_for_scores(broken), ask_for_scores(broken)]
    steps = 0
    while thread._turn():
        steps += 1
        assert steps < 100
    found = [each.get_nowait() for each in answers]  # which raises where somebody has none
    assert any(isinstance(answer, ShuttingDown) for answer in found)
    assert thread.trouble(60) == "the device of fake is lost"


def test_a_slot_that_can_not_be_moved_costs_the_request_that_had_it() -> None:
    """Not its neighbours, nor those who wait."""
    alone = engine()
    thread, device, move = EngineThread([alone]), cast(Any, alone._backend), alone._backend.move

    def fails_once(source: int, target: int) -> Never:
        device.move = move
        raise ComputeError("a copy failed")

    device.move = fails_once
    short, long, waits = ask(alone, 3), ask(alone, 30), ask(alone, 3)
    while thread._turn():
        pass
    assert isinstance(short.get_nowait(), Result)
    assert isinstance(long.get_nowait(), ComputeError)
    assert isinstance(waits.get_nowait(), Result)


def test_nobody_waits_for_what_a_device_says_of_itself() -> None:
    class Silent:
        def device_stats(self) -> Never:
            raise ComputeError("GPU 0 says nothing")

    alone: Any = engine()
    alone._measured = Silent()
    thread, answers = EngineThread([alone]), ask(alone, 3)
    while thread._turn():
        pass
    assert isinstance(answers.get_nowait(), Result)
