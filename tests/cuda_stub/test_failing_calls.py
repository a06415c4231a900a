"""Every kind of call of CUDA's that a model makes fails once, or is where the device is lost: everybody is answered,
the engine goes on or says that its device is lost, and everything is given back."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from beamline.serving.engine.core import Engine
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import BeamlineError, Cancelled, ComputeError, Overloaded, ShuttingDown
from tests.cuda_stub.conftest import MODELS
from tests.cuda_stub.conversation import failed, load, talk
from tests.support.cuda_stub.stub import Held, Stub

pytestmark = pytest.mark.usefixtures("plausible", "quiet")

# Minutes each on an idle machine: a model is loaded some two hundred times.
FULL = (pytest.mark.full, pytest.mark.timeout(7200))
KINDS = [
    pytest.param("transformer", id="some"),
    *(pytest.param(kind, marks=FULL, id=kind) for kind in ("transformer", "recurrent", "language")),
]
# What gives something back: where that fails, there is nothing to do but to say so.
GIVES_BACK = ("Free", "Destroy", "Unload", "Release")
SLOTS = 4


def kinds_of_calls(stub: Stub, full: bool) -> list[tuple[str, int]]:
    """Which call is to fail, of those that were made since the last reset: a few kinds, each the first time; or all of
    them, and each at several places."""
    counts = stub.counts()
    found = {name: counts[name].calls for name in sorted(counts) if _is_a_call(name)}
    stub.reset()
    if not full:
        return [(name, 1) for name in list(found)[::4]]
    return [(name, number) for name, calls in found.items() for number in places(calls)]


def _is_a_call(name: str) -> bool:
    return name == "kernel launch" or (name.startswith("cu") and not any(each in name for each in GIVES_BACK))


def places(calls: int) -> list[int]:
    """The first of them, the last, and some between."""
    return sorted({1 + round(part * (calls - 1) / 4) for part in range(5)})


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return "full" in {mark.name for mark in request.node.iter_markers()}


@contextmanager
def noted(problems: list[str], name: str, number: int) -> Iterator[None]:
    """So that one run shows all of them."""
    try:
        yield
    except AssertionError as error:
        problems.append(f"{name} {number}: {str(error).splitlines()[0]}")
        print(problems[-1], flush=True)


def ours(held: Held) -> Held:
    """But for cuBLAS's and cuDNN's handles: ONNX Runtime loses them where it fails to make a session."""
    return dataclasses.replace(held, library_handles=0)


def loaded(kind: str) -> tuple[Engine, EngineThread]:
    """With the thread that steps it, which answers those whose step it could not make: here, call by call."""
    engine = load(MODELS / kind / "float32", SLOTS)
    return engine, EngineThread([engine])


def errors_of(engine: Engine, thread: EngineThread) -> list[Exception]:
    """What those are told who were not answered, but for those who did not want to be."""
    answers = talk(engine, 8, step_with=thread._turn)
    return [error for error in failed(answers) if not isinstance(error, Cancelled)]


def calls_of_a_talk(kind: str, stub: Stub, full: bool) -> list[tuple[str, int]]:
    running = loaded(kind)
    stub.reset()
    assert errors_of(*running) == []
    return kinds_of_calls(stub, full)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_while_requests_run(kind: str, full: bool, stub: Stub) -> None:
    """It costs those who were in that step, or about to join it; the next ones are answered."""
    before, failures, problems = ours(stub.held), 0, list[str]()
    for name, number in calls_of_a_talk(kind, stub, full):
        with noted(problems, name, number):
            failures += _talk_with_one_failure(kind, stub, name, number)
        stub.heal()
        gc.collect()
        with noted(problems, name, number):
            assert ours(stub.held) == before
    assert problems == []
    assert failures > 2


def _talk_with_one_failure(kind: str, stub: Stub, name: str, number: int) -> bool:
    """Whether anybody noticed."""
    running = loaded(kind)
    stub.fail_call(name, number)
    errors = errors_of(*running)
    assert all(isinstance(error, ComputeError | Overloaded) for error in errors), errors
    assert len(errors) <= SLOTS, errors
    assert running[1].trouble(60.0) is None
    stub.heal()
    assert errors_of(*running) == []
    return bool(errors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_lost_while_requests_run(kind: str, full: bool, stub: Stub) -> None:
    """At whichever call: everybody is answered, and the watchdog is told. That this process lives to see it says that
    no session is closed then, in which ONNX Runtime would end it."""
    problems: list[str] = []
    for name, number in calls_of_a_talk(kind, stub, full):
        with noted(problems, name, number):
            _talk_until_lost(kind, stub, name, number)
        gc.collect()
        stub.heal()
    assert problems == []


def _talk_until_lost(kind: str, stub: Stub, name: str, number: int) -> None:
    running = loaded(kind)
    stub.fail_call(name, number, loses=True)
    errors = errors_of(*running) or errors_of(*running)  # it may have been the last call
    assert {type(error) for error in errors} <= {ComputeError, ShuttingDown}, errors
    assert "is lost" in str(running[1].trouble(60.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loses", [False, True], ids=["fails", "loses the device"])
def test_a_call_that_fails_while_a_model_is_loaded(kind: str, loses: bool, full: bool, stub: Stub) -> None:
    """It is not served, for a reason that is said, and everything is given back; but not by a device that is lost."""
    stub.reset()
    loaded(kind)
    gc.collect()
    before, refused, problems = ours(stub.held), 0, list[str]()
    for name, number in kinds_of_calls(stub, full):
        stub.fail_call(name, number, loses)
        why = _refusal(kind)
        refused += why is not None
        with noted(problems, name, number):
            assert why is None or len(str(why)) > 20, why
        del why
        gc.collect()
        stub.heal()
        with noted(problems, name, number):
            assert loses or ours(stub.held) == before
    assert problems == []
    assert refused > 2


def _refusal(kind: str) -> BeamlineError | None:
    try:
        loaded(kind)
    except BeamlineError as error:
        return error.with_traceback(None)
    return None
