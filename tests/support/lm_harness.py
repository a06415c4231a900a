"""An engine over the tiny language model, stepped by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import cast

from serving.backends.onnxruntime import OnnxRuntimeBackend
from serving.engine.request import DecodingOptions, Piece, Request, Result
from serving.engine.stats import StepStats
from tests.support.engines import Answer, make_engine
from tests.support.ties import same_or_tie
from tests.support.tiny_lm import VOCABULARY, TinyModel

GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=25)
BEAM = replace(GREEDY, beam_size=4, num_hypotheses=4)
SAMPLE = replace(GREEDY, temperature=1.0, seed=11)
ENDLESS = replace(GREEDY, min_length=GREEDY.max_length)
FOUR = replace(ENDLESS, beam_size=4, num_hypotheses=4, temperature=1.0)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(1000 * seed + length)
    return tuple(chance.randrange(3, VOCABULARY) for _ in range(length))


class Harness:
    """An engine that a test steps by hand, and everything that it says."""

    def __init__(self, model: TinyModel, slots: int = 8, cache: int = 0) -> None:
        self.now = 0.0
        self.stats: list[StepStats] = []
        self.answers: dict[int, Answer] = {}
        self.pieces: dict[int, list[Piece]] = {}
        self.engine = make_engine(
            model.folder,
            model.manifest,
            slots,
            max_queue=1000,
            prefix_cache_bytes=cache,
            observe=self.stats.append,
            clock=lambda: self.now,
        )
        self.backend = cast(OnnxRuntimeBackend, self.engine._backend)  # or one with the same methods

    def submit(self, source: tuple[int, ...], options: DecodingOptions, deadline: float | None = None) -> int:
        request = Request(
            source,
            options,
            lambda answer: self._answered(request.id, answer),
            deadline,
            lambda piece: self.pieces[request.id].append(piece),
        )
        self.pieces[request.id] = []
        self.engine.submit(request)
        return request.id

    def _answered(self, number: int, answer: Answer) -> None:
        assert number not in self.answers, "answered twice"
        self.answers[number] = answer

    def finish(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def result(self, number: int) -> Result:
        answer = self.answers[number]
        assert isinstance(answer, Result), answer
        return answer

    def answer(self, source: tuple[int, ...], options: DecodingOptions) -> Result:
        number = self.submit(source, options)
        self.finish()
        return self.result(number)


def same(one: Result, other: Result) -> bool:
    return all(
        same_or_tie(mine.tokens, mine.token_log_probs, yours.tokens, yours.token_log_probs)
        for mine, yours in zip(one.hypotheses, other.hypotheses, strict=True)
    )
