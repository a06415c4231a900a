"""Every kind of call of CUDA's that a model makes fails once, or is where the device is lost: everybody is answered,
the engine goes on or says that its device is lost, and everything is given back."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from beamline.serving.engine.core import Engine
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import BeamlineError, Cancelled, ComputeError, Overloaded, ShuttingDown
from tests.cuda_stub.conftest import MODELS
from tests.cuda_stub.conversation import failed, load, talk
from tests.support.cuda_stub.build import ROOT
from tests.support.cuda_stub.stub import Held, Stub

pytestmark = pytest.mark.usefixtures("plausible", "quiet")

# Minutes each on an idle machine: a model is loaded some two hundred times.
FULL = (pytest.mark.full, pytest.mark.timeout(7200))
ALL = {kind: pytest.param(kind, marks=FULL, id=kind) for kind in ("transformer", "recurrent", "language")}
KINDS = [pytest.param("transformer", id="some"), *ALL.values()]
# A process may end by that: it has a test of its own.
LOST = [each for each in KINDS if each is not ALL["recurrent"]]
# What gives something back: where that fails, there is nothing to do but to say so. By the last of them ONNX Runtime
# 1.31 has pinned memory given back when it closes a session that is not recorded: it loses that memory where the call
# fails, and throws in a destructor, which ends the process, where the device is lost in that very call.
GIVES_BACK = ("Free", "Destroy", "Unload", "Release", "cudaLaunchHostFunc")
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


@pytest.mark.parametrize("kind", LOST)
def test_a_device_that_is_lost_while_requests_run(kind: str, full: bool, stub: Stub) -> None:
    """At whichever call: everybody is answered, and the watchdog is told. That this process lives to see it says that
    no session is closed then, in which ONNX Runtime would end it."""
    problems: list[str] = []
    for name, number in calls_of_a_talk(kind, stub, full):
        with noted(problems, name, number):
            talk_until_lost(kind, stub, name, number)
        gc.collect()
        stub.heal()
    assert problems == []


def talk_until_lost(kind: str, stub: Stub, name: str, number: int) -> None:
    running = loaded(kind)
    stub.fail_call(name, number, loses=True)
    errors = errors_of(*running) or errors_of(*running)  # it may have been the last call
    assert {type(error) for error in errors} <= {ComputeError, ShuttingDown}, errors
    assert "is lost" in str(running[1].trouble(60.0))


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("what", ["talk", "load"])
def test_a_device_that_is_lost_beneath_a_recurrent_model(what: str, tmp_path: Path) -> None:
    """Everybody is answered, a model that is being loaded is refused; or the process ends at once, and with it every
    call: a run of a recurrent encoder has events of its own, in whose destructor ONNX Runtime 1.31 throws."""
    first = ended = 0
    last = ""
    while last != "all":
        command = [sys.executable, "-m", "tests.cuda_stub.losing", what, "recurrent", str(first)]
        (tmp_path / "control").unlink(missing_ok=True)
        (tmp_path / "control").touch()
        apart = {**os.environ, "CUDA_STUB_CONTROL": str(tmp_path / "control")}
        run = subprocess.run(command, cwd=ROOT, env=apart, capture_output=True, text=True, timeout=3600, check=False)
        last = run.stdout.splitlines()[-1]
        if run.returncode:
            assert run.returncode == -signal.SIGABRT, run.stderr[-2000:]
            assert "terminate called after throwing an instance of 'onnxruntime::" in run.stderr
            assert "expr=cudaEventDestroy(event_)" in run.stderr
            ended += 1
        if last != "all":
            first = 1 + int(last.split()[0])
    print(f"the process ended at {ended} calls")


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_while_a_model_is_loaded(kind: str, full: bool, stub: Stub) -> None:
    """It is not served, for a reason that is said, and everything is given back."""
    calls = calls_of_a_load(kind, stub, full)
    before, refused, problems = ours(stub.held), 0, list[str]()
    for name, number in calls:
        with noted(problems, name, number):
            refused += is_refused(kind, stub, name, number, loses=False)
        gc.collect()
        stub.heal()
        with noted(problems, name, number):
            assert ours(stub.held) == before
    assert problems == []
    assert refused > 2


@pytest.mark.parametrize("kind", LOST)
def test_a_device_that_is_lost_while_a_model_is_loaded(kind: str, full: bool, stub: Stub) -> None:
    """The same, but that nothing is given back by a device that is lost."""
    refused, problems = 0, list[str]()
    for name, number in calls_of_a_load(kind, stub, full):
        with noted(problems, name, number):
            refused += is_refused(kind, stub, name, number, loses=True)
        gc.collect()
        stub.heal()
    assert problems == []
    assert refused > 2


def calls_of_a_load(kind: str, stub: Stub, full: bool) -> list[tuple[str, int]]:
    stub.reset()
    loaded(kind)
    gc.collect()
    return kinds_of_calls(stub, full)


def is_refused(kind: str, stub: Stub, name: str, number: int, loses: bool) -> bool:
    """Whether anybody noticed."""
    stub.fail_call(name, number, loses)
    why = _why_refused(kind)
    assert why is None or len(why) > 20, why
    return why is not None


def _why_refused(kind: str) -> str | None:
    try:
        loaded(kind)
    except BeamlineError as error:
        return str(error)
    return None
