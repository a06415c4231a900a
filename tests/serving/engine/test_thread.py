"""The thread that drives engines: they come and go between two steps, and nothing keeps one that is gone."""

from __future__ import annotations

import queue
import threading
import weakref

import pytest

from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result
from beamline.serving.engine.request import Request
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import ShuttingDown
from beamline.serving.models.engines import FakeSettings, fake_engine

WAIT = 120  # seconds; only ever used up by a failure


def engine() -> Engine:
    return fake_engine(FakeSettings(slots=2), lambda stats: None)


def ask(target: Engine, length: int) -> queue.SimpleQueue[Output]:
    answers: queue.SimpleQueue[Output] = queue.SimpleQueue()
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=length + 2)
    target.submit(Request((*[7] * length, 2), options, lambda answer: answers.put(answer)))
    return answers


def test_an_engine_that_is_retired_finishes_and_nothing_keeps_it() -> None:
    thread = EngineThread()
    thread.start()
    try:
        old, new = engine(), engine()
        thread.add(old)
        running = [ask(old, 500) for _ in range(4)]  # two in slots, two that wait
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
