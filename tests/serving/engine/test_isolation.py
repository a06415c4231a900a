"""A fault at every call that the engine makes on behalf of one request: it fails alone, and its neighbours' answers are
those of a quiet engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece, Result
from beamline.serving.engine.request import Request, RequestOutput
from beamline.serving.errors import ComputeError

OPTIONS = DecodingOptions(beam_size=2, num_hypotheses=2, max_length=60, no_repeat_ngram_size=20)
POISONED = 2  # which of the requests
Fault = Callable[[Engine, Request], None]


def sources() -> list[tuple[int, ...]]:
    return [(*range(10 + number, 30 + 2 * number), 2) for number in range(5)]


def engine(language_model: bool) -> Engine:
    manifest = fake_manifest("fake-lm", "generate") if language_model else fake_manifest()
    backend = FakeBackend(manifest, 0.0)
    return Engine(manifest, backend, Plan.of(manifest, 8), max_queue=100, prefix_cache_bytes=1 << 20)


def raising(*arguments: Any, **more: Any) -> Any:
    raise RuntimeError("injected")


def break_method(owner: Callable[[Request], Any], name: str) -> Fault:
    """A method of the request's own, from its first use on."""

    def inject(engine: Engine, request: Request) -> None:
        setattr(owner(request), name, raising)

    return inject


SEARCH: dict[str, Fault] = {
    "forced token": break_method(lambda request: request.search, "forced_token"),
    "logits processors": break_method(lambda request: request.processors, "edits"),
    "levels of the tree": break_method(lambda request: request.search, "levels"),
    "advance": break_method(lambda request: request.search, "advance"),
    "pieces": break_method(lambda request: request.search, "new_pieces"),
    "hypotheses": break_method(lambda request: request.search, "hypotheses"),
}


def run(engine: Engine, fault: Fault | None, options: DecodingOptions = OPTIONS) -> list[Output]:
    requests = [Request(source, options, streams=True) for source in sources()]
    for request in requests:
        engine.submit(request)
    if fault is not None:
        fault(engine, requests[POISONED])
    outputs: list[RequestOutput] = []
    while engine.busy:
        outputs += engine.step()
    answers = {each.request.id: each.output for each in outputs if not isinstance(each.output, Piece)}
    assert len([each for each in outputs if not isinstance(each.output, Piece)]) == len(requests)
    return [answers[request.id] for request in requests]


def hypotheses(answer: Output) -> Any:
    assert isinstance(answer, Result), answer
    return answer.hypotheses


def check(found: list[Output], quiet: list[Output]) -> None:
    assert isinstance(found[POISONED], ComputeError)
    for number, (mine, expected) in enumerate(zip(found, quiet, strict=True)):
        if number != POISONED:
            assert hypotheses(mine) == hypotheses(expected)


@pytest.mark.parametrize("language_model", [False, True])
@pytest.mark.parametrize("fault", SEARCH)
def test_a_fault_of_one_request_stays_its_own(fault: str, language_model: bool) -> None:
    served = engine(language_model)
    check(run(served, SEARCH[fault]), run(engine(language_model), None))
    assert [hypotheses(each) for each in run(served, None)] == [
        hypotheses(each) for each in run(engine(language_model), None)
    ], "the engine goes on"


def test_a_time_limit_that_can_not_be_kept() -> None:
    options = replace(OPTIONS, time_limit=0.0)
    found = run(engine(False), break_method(lambda request: request.search, "stop"), options)
    assert isinstance(found[POISONED], ComputeError)
    assert [type(answer) for number, answer in enumerate(found) if number != POISONED] == [Result] * 4


def fails_for(backend: Any, name: str, victim: Callable[..., bool]) -> None:
    """The backend's method fails where it works for one request."""
    method = getattr(backend, name)

    def picky(*arguments: Any) -> Any:
        if victim(*arguments):
            raising()
        return method(*arguments)

    setattr(backend, name, picky)


DEVICE: dict[str, tuple[str, Callable[[list[Any], int], Callable[..., bool]]]] = {
    # The memory of prompts, where the poisoned one is among them: by its length.
    "prompts": ("prompts", lambda marks, length: lambda lengths, known: length in lengths),
    "prefill": ("take_in", lambda marks, length: lambda memories, chunk: len(memories) > 1 or chunk.tokens[0, 0] == 12),
    "fill": ("fill", lambda marks, length: lambda slot, memory: _nth(marks, POISONED)),
    "place": ("place", lambda marks, length: lambda slot, memory, start: _nth(marks, POISONED)),
}


def _nth(marks: list[Any], number: int) -> bool:
    marks.append(None)
    return len(marks) == number + 1


@pytest.mark.parametrize("fault", DEVICE)
def test_a_fault_of_the_device_for_one_request_stays_its_own(fault: str) -> None:
    name, victim = DEVICE[fault]

    def inject(engine: Engine, request: Request) -> None:
        fails_for(engine._backend, name, victim([], len(request.source) - 1))

    found, quiet = run(engine(True), inject), run(engine(True), None)
    failed = [number for number, answer in enumerate(found) if isinstance(answer, Exception)]
    assert len(failed) == 1
    assert isinstance(found[failed[0]], ComputeError)
    for number, (mine, expected) in enumerate(zip(found, quiet, strict=True)):
        if number not in failed:
            assert hypotheses(mine) == hypotheses(expected)


def test_a_prompt_that_can_not_be_kept_is_answered() -> None:
    """The prefix cache is a favour to others."""
    served = engine(True)
    fails_for(served._backend, "prefix", lambda memory, length: True)
    assert [hypotheses(each) for each in run(served, None)] == [hypotheses(each) for each in run(engine(True), None)]
