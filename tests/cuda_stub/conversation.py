"""Requests of all kinds, as an engine of a GPU answers them over the stub: they join, leave, and are cancelled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece, Result, Scores
from beamline.serving.engine.request import Request, deliver
from beamline.serving.errors import ShuttingDown
from beamline.serving.models.engines import EngineSettings, load_engine
from tests.cuda_stub.conftest import on_gpu

BEAM = DecodingOptions(beam_size=4, num_hypotheses=2, max_length=24)
KINDS = (
    BEAM,
    replace(BEAM, beam_size=1, num_hypotheses=1),
    replace(BEAM, no_repeat_ngram_size=2, repetition_penalty=1.5),
    replace(BEAM, beam_size=3, num_hypotheses=3, temperature=0.8, top_k=20, seed=7),
    replace(BEAM, suppress_tokens=tuple(range(8, 180))),
    replace(BEAM, beam_size=2, num_hypotheses=1, top_log_probs=3),
)


def load(folder: Path, slots: int = 4) -> Engine:
    return load_engine(folder, read_manifest(folder), EngineSettings(choice=on_gpu(), slots=slots), lambda stats: None)


@dataclass
class Conversation:
    """Answers by number; a request that is cancelled has one, too."""

    engine: Engine
    answers: dict[int, Output] = field(default_factory=dict)
    step_with: Callable[[], bool] | None = None  # instead of the engine's own step; false where there is no work

    def submit(self, number: int, options: DecodingOptions | None, length: int) -> Request:
        source = tuple(5 + place % 40 for place in range(length))

        def keep(output: Output) -> None:
            if not isinstance(output, Piece):
                self.answers[number] = output

        if options is None:
            request = Request(source, on_output=keep, target=source, labels=source)
        else:
            request = Request(source, options, on_output=keep)
        try:
            self.engine.submit(request)
        except ShuttingDown as error:
            self.answers[number] = error
        return request

    def step(self) -> bool:
        if self.step_with is not None:
            return self.step_with()
        deliver(self.engine.step())
        return True

    def finish(self) -> None:
        steps = 0
        while self.engine.busy and self.step():
            steps += 1
            assert steps < 2000, "it never ends"


def talk(
    engine: Engine,
    count: int = 12,
    seed: int = 0,
    scores: bool = True,
    step_with: Callable[[], bool] | None = None,
) -> dict[int, Output]:
    """Two requests every third step, one of eight cancelled; all of them are answered."""
    talk, chance = Conversation(engine, step_with=step_with), random.Random(seed)
    for number in range(count):
        options = None if scores and number % 6 == 5 else KINDS[number % len(KINDS)]
        request = talk.submit(number, options, chance.randint(1, 20))
        if number % 2:
            for _ in range(3):
                talk.step()
        if number % 8 == 7:
            engine.cancel(request.id)
    talk.finish()
    assert set(talk.answers) == set(range(count))
    return talk.answers


def failed(answers: dict[int, Output]) -> list[Exception]:
    return [each for each in answers.values() if isinstance(each, Exception)]


def good(answers: Sequence[Output]) -> bool:
    return all(isinstance(each, Result | Scores) for each in answers)
