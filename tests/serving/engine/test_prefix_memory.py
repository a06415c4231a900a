"""Remembered prompts on a GPU that has too little memory left: they go before anybody is refused, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from beamline.serving.backends.gpu import GpuBackend
from beamline.serving.contract.backend import StepInputs
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Result, Scores
from beamline.serving.engine.request import Request
from beamline.serving.errors import OutOfMemory, Overloaded
from tests.support.emulated_device import EmulatedDevice
from tests.support.emulator import emulated_cuda_backend
from tests.support.engines import step
from tests.support.lm_requests import GREEDY, prompt, same
from tests.support.tiny_lm import LAYERS, WIDTH, TinyModel

ENTRY = 2 * LAYERS * WIDTH * 4  # bytes: keys and values in float32
NO_LIMIT = 2**40


class Served:
    """An engine over an emulated GPU, which remembers whatever there is memory for."""

    def __init__(self, model: TinyModel) -> None:
        self.device = EmulatedDevice()
        self.backend: GpuBackend = emulated_cuda_backend(model.folder, model.manifest, self.device)
        plan = Plan.of(model.manifest, 4)
        self.engine = Engine(
            model.manifest, self.backend, plan, max_queue=100, prefix_cache_bytes=NO_LIMIT, clock=lambda: 0.0
        )

    def leave(self, nbytes: int) -> None:
        """So much memory, beside what is in use now."""
        self.device.most_bytes = self.device.allocated_bytes + nbytes

    def submit(self, source: tuple[int, ...], options: DecodingOptions = GREEDY) -> list[Output]:
        outputs: list[Output] = []
        self.engine.submit(Request(source, options, outputs.append))
        return outputs

    def finish(self) -> None:
        while self.engine.busy:
            step(self.engine)

    def answer(self, source: tuple[int, ...], options: DecodingOptions = GREEDY) -> Result:
        outputs = self.submit(source, options)
        self.finish()
        return result(outputs)


def result(outputs: list[Output]) -> Result:
    (answer,) = outputs
    assert isinstance(answer, Result), answer
    return answer


@pytest.fixture
def served(tiny_lm: TinyModel) -> Served:
    return Served(tiny_lm)


def test_remembered_prompts_make_room_for_another_one(tiny_lm: TinyModel, served: Served) -> None:
    served.answer(prompt(300, seed=1))
    served.leave(250 * ENTRY)
    assert same(served.answer(prompt(300, seed=2)), Served(tiny_lm).answer(prompt(300, seed=2)))
    assert served.answer(prompt(300, seed=2)).cached_tokens == 299  # it is remembered instead
    assert served.answer(prompt(300, seed=1)).cached_tokens == 0


def test_they_make_room_for_a_chunk(tiny_lm: TinyModel, served: Served) -> None:
    """For what is computed in between, once the prompt has its memory."""
    served.answer(prompt(300, seed=1))
    served.leave(300 * ENTRY + 4096)
    assert same(served.answer(prompt(300, seed=2)), Served(tiny_lm).answer(prompt(300, seed=2)))


def test_they_make_room_for_prompts_that_come_together(tiny_lm: TinyModel, served: Served) -> None:
    """One of which alone would have had enough."""
    served.answer(prompt(300, seed=1))
    served.leave(500 * ENTRY)
    together = [served.submit(prompt(300, seed)) for seed in (2, 3)]
    served.finish()
    for seed, outputs in zip((2, 3), together, strict=True):
        assert same(result(outputs), Served(tiny_lm).answer(prompt(300, seed)))


def test_a_prompt_that_continues_a_remembered_one_is_computed_anew(tiny_lm: TinyModel, served: Served) -> None:
    """Where there is too little memory for both."""
    served.answer(prompt(300, seed=1))
    served.leave(340 * ENTRY)
    longer = (*prompt(300, seed=1), *prompt(60, seed=2))
    found = served.answer(longer)
    assert same(found, Served(tiny_lm).answer(longer))
    assert found.cached_tokens == 0


def test_a_remembered_prompt_of_which_a_copy_is_needed_is_computed_anew(tiny_lm: TinyModel, served: Served) -> None:
    """It is the short beginning of a long one, of which there is no room for more."""
    served.answer(prompt(400, seed=1))
    served.leave(60 * ENTRY)
    short = prompt(400, seed=1)[:101]
    found = served.answer(short)
    assert same(found, Served(tiny_lm).answer(short))
    assert found.cached_tokens == 0


def test_they_make_room_for_a_step(tiny_lm: TinyModel, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who runs is refused for what a step takes while it is computed."""
    served.answer(prompt(300, seed=1))
    served.leave(100 * ENTRY)
    launch = served.backend.launch

    def needs_more(inputs: StepInputs) -> None:
        served.device.free(served.device.allocate(200 * ENTRY))
        launch(inputs)

    monkeypatch.setattr(served.backend, "launch", needs_more)
    assert same(served.answer(prompt(20, seed=2)), Served(tiny_lm).answer(prompt(20, seed=2)))


def test_nothing_is_forgotten_where_there_is_enough(served: Served) -> None:
    served.answer(prompt(300, seed=1))
    served.leave(700 * ENTRY)
    served.answer(prompt(300, seed=2))
    assert [served.answer(prompt(300, seed)).cached_tokens for seed in (1, 2)] == [299, 299]


def test_without_anything_to_forget_a_prompt_is_refused(tiny_lm: TinyModel, served: Served) -> None:
    served.leave(150 * ENTRY)
    refused = served.submit(prompt(300, seed=1))
    served.finish()
    assert [type(answer) for answer in refused] == [Overloaded]
    assert same(served.answer(prompt(40)), Served(tiny_lm).answer(prompt(40)))


def test_they_make_room_for_scores(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose graph is opened when it is first needed, when all else may be full already."""
    served.answer(prompt(300, seed=1))
    served.answer(prompt(300, seed=2))
    score = served.backend.score_batch

    def picky(*arguments: Any) -> Any:
        if served.engine._prefill._cache.size:  # type: ignore[attr-defined]
            raise OutOfMemory("it is full")
        return score(*arguments)

    monkeypatch.setattr(served.backend, "score_batch", picky)
    outputs: list[Output] = []
    served.engine.submit(Request((), None, outputs.append, target=(5, 6, 7), labels=(6, 7, 8)))
    served.finish()
    assert [type(output) for output in outputs] == [Scores]


def test_what_they_had_is_there_for_the_librarys_own_memory(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does not take from our pool: that has to be trimmed first."""
    served.answer(prompt(300, seed=1))
    prepare, trim, pool = served.backend._runner.prepare, served.device.trim, [True]

    def trimmed() -> None:
        pool[0] = served.engine._prefill._cache.size > 0  # type: ignore[attr-defined]
        trim()

    def picky(graph: str, tensors: Any, keep: bool = False) -> Callable[[], None]:
        if graph == "prefill" and pool[0]:
            raise OutOfMemory("it is full")
        return prepare(graph, tensors, keep)

    monkeypatch.setattr(served.device, "trim", trimmed)
    monkeypatch.setattr(served.backend._runner, "prepare", picky)
    served.answer(prompt(300, seed=2))
