"""Out of memory, a launch that fails, a device that is lost: what happens then, and that nobody waits for ever."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from beamline.serving.backends import late_graphs, onnxruntime_cuda
from beamline.serving.backends.cuda import CudaDevice
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output
from beamline.serving.engine.request import Request, deliver
from beamline.serving.engine.thread import EngineThread
from beamline.serving.errors import Cancelled, ComputeError, ModelError, OutOfMemory, Overloaded, ShuttingDown
from beamline.serving.models.engines import plan_that_fits
from tests.cuda_stub.conftest import EN_DE, MODELS, backend_of
from tests.cuda_stub.conversation import KINDS, Conversation, failed, load, talk
from tests.support.cuda_stub.stub import Stub
from tests.support.processes import eventually

FOLDERS = [MODELS / kind / "float32" for kind in ("transformer", "recurrent", "language")]


pytestmark = pytest.mark.usefixtures("plausible")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_a_conversation_leaves_nothing_behind(folder: Path, stub: Stub) -> None:
    before = stub.held
    engine = load(folder)
    answers = talk(engine, 24)
    assert {type(error) for error in failed(answers)} == {Cancelled}
    settled = stub.held
    for seed in range(2):
        talk(engine, 24, seed)
    assert (stub.held.events, stub.held.streams) == (settled.events, settled.streams)
    del engine
    gc.collect()
    assert stub.held == before


def allocations(stub: Stub, folder: Path) -> tuple[int, int]:
    """While a model is loaded, and while it answers."""
    begun = stub.allocations
    engine = load(folder)
    loaded = stub.allocations
    talk(engine)
    return loaded - begun, stub.allocations - loaded


def refused_alone(answers: dict[int, Output]) -> None:
    """At most one, who is told to try again; and the one that was cancelled."""
    errors = [error for error in failed(answers) if not isinstance(error, Cancelled)]
    assert len(errors) <= 1, errors
    for error in errors:
        assert isinstance(error, Overloaded)
        assert "too little memory" in str(error)


@pytest.mark.parametrize("runs", [10, pytest.param(None, marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_out_of_memory_while_requests_run(
    folder: Path, runs: int | None, stub: Stub, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every allocation in turn, or some of them, and when it is tried again: one request is refused, or nobody."""
    monkeypatch.setattr(late_graphs, "_AGAIN_AFTER", 0.0)
    _, count = allocations(stub, folder)
    refused = 0
    gc.collect()
    before = stub.held
    for number in range(1, count + 1, 1 if runs is None else -(-count // runs)):
        engine = load(folder)
        stub.fail_allocation(number, times=2)
        answers = talk(engine)
        refused_alone(answers)
        refused += any(isinstance(error, Overloaded) for error in failed(answers))
        stub.heal()
        assert not list(failed(talk(engine, 4)))
        del engine, answers
        gc.collect()
        assert stub.held == before, f"allocation {number}"
    assert refused > 0


def test_a_pool_that_has_no_memory_gives_back_what_it_keeps(stub: Stub) -> None:
    """And is asked once more, before anybody is refused."""
    gpu = CudaDevice(0)
    stub.fail_allocation(1)
    gpu.allocate(2**20)
    assert stub.counts()["cuMemPoolTrimTo"].calls == 1
    stub.fail_allocation(1, times=0)
    with pytest.raises(OutOfMemory):
        gpu.allocate(2**20)
    stub.heal()


def test_scores_for_which_there_is_no_memory(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graph is opened when it is needed; where that can't be, all weights are not read again for each request."""
    engine = load(MODELS / "transformer" / "float32")
    opened, original = list[str](), onnxruntime_cuda.open_session

    def counted(path: Path, *rest: Any) -> Any:
        opened.append(path.stem)
        return original(path, *rest)

    monkeypatch.setattr(onnxruntime_cuda, "open_session", counted)
    stub.fail_allocation(1, times=0)
    answers: list[Output] = []
    for _ in range(3):
        engine.submit(Request((5, 6, 7), None, answers.append, target=(1, 2), labels=(2, 3)))
        while engine.busy:
            deliver(engine.step())
    stub.heal()
    aligning = DecodingOptions(beam_size=2, num_hypotheses=1, max_length=4, return_alignment=True)
    engine.submit(Request((5, 6, 7), aligning, answers.append))
    while engine.busy:
        deliver(engine.step())
    assert {type(answer) for answer in answers} == {Overloaded}
    assert len(answers) == 4
    assert opened == 4 * ["score"]  # twice, and each time once more when a pool was trimmed


def refusal(folder: Path) -> ModelError | None:
    """Why it can't be loaded."""
    try:
        load(folder)
    except ModelError as error:
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("runs", [10, pytest.param(None, marks=pytest.mark.full)], ids=["some", "all"])
def test_out_of_memory_while_a_model_is_loaded(runs: int | None, stub: Stub, quiet: None) -> None:
    """At every allocation, or some: it is not served, for a reason that is said, and everything is given back."""
    folder = MODELS / "transformer" / "float32"
    count, _ = allocations(stub, folder)
    gc.collect()
    before = stub.held
    tried = refused = 0
    for number in range(1, count + 1, 1 if runs is None else -(-count // runs)):
        tried += 1
        stub.fail_allocation(number, times=0)
        why = refusal(folder)
        refused += why is not None
        told = "does not answer: the device has too little memory"
        assert why is None or isinstance(why, OutOfMemory) or told in str(why), why
        del why
        stub.heal()
        gc.collect()
        assert stub.held == before, f"allocation {number}"
    assert refused >= 0.8 * tried
    talk(load(folder), 4)


def test_slots_are_planned_from_the_memory_that_is_free(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from beamline.serving.engine.capacity import Plan

    backend, manifest = backend_of(EN_DE)
    plan = Plan.of(manifest, 32)
    assert plan_that_fits(plan, backend, manifest, 0) is plan
    one = backend.needed_bytes(1, plan.largest)
    monkeypatch.setenv(
        "CUDA_STUB_MEMORY", str(stub.held.device_bytes[0] + 8 * backend.needed_bytes(8, plan.largest) // 7)
    )
    found = plan_that_fits(plan, backend, manifest, 0)
    assert 1 <= found.slots < 32
    assert f"{found.slots} slots of en-de fit instead of 32, each of {plan.largest.cache} cache entries" in caplog.text
    assert backend.allocate(found.slots, found.largest) > 0
    monkeypatch.setenv("CUDA_STUB_MEMORY", str(stub.held.device_bytes[0] + one // 100))
    with pytest.raises(ModelError, match=r"GPU 0 has \d+ MiB left, and one request of en-de may need"):
        plan_that_fits(plan, backend, manifest, 0)


def test_a_launch_that_fails(stub: Stub) -> None:
    """The requests of that step fail; the next ones don't."""
    engine = load(MODELS / "transformer" / "float32")
    for number in (1, 40, 150, 400):
        stub.fail_launch(number)
        errors = [error for error in failed(talk(engine)) if not isinstance(error, Cancelled)]
        assert all(isinstance(error, ComputeError) for error in errors)
        assert len(errors) <= 4
        stub.heal()
        assert {type(error) for error in failed(talk(engine))} <= {Cancelled}


@pytest.mark.parametrize("error", [719, 716, 710], ids=["launch failed", "misaligned address", "assert"])
def test_a_device_that_is_lost(error: int, stub: Stub) -> None:
    """By whichever error of those that stay: everybody is answered, and the watchdog is told."""
    engine = load(MODELS / "transformer" / "float32")
    thread = EngineThread([engine])
    talking = Conversation(engine)
    for number, options in enumerate(KINDS * 3):
        talking.submit(number, options, 10)
    stub.lose(0, error)
    thread.start()
    eventually(lambda: len(talking.answers) == 3 * len(KINDS), "everybody is answered")
    assert {type(error) for error in talking.answers.values()} <= {ComputeError, ShuttingDown}
    eventually(lambda: thread.trouble(60.0) is not None, "the watchdog is told")
    thread.stop()
    stub.lose(None)
