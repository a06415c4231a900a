"""Prompts and options for the tiny language model."""

from __future__ import annotations

import random
from dataclasses import replace

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Result
from tests.support.ties import same_or_tie
from tests.support.tiny_lm import VOCABULARY

GREEDY = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=25)
BEAM = replace(GREEDY, beam_size=4, num_hypotheses=4)
SAMPLE = replace(GREEDY, temperature=1.0, seed=11)
ENDLESS = replace(GREEDY, min_length=GREEDY.max_length)
FOUR = replace(ENDLESS, beam_size=4, num_hypotheses=4, temperature=1.0)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(1000 * seed + length)
    return tuple(chance.randrange(3, VOCABULARY) for _ in range(length))


def same(one: Result, other: Result) -> bool:
    return all(
        same_or_tie(mine.tokens, mine.token_log_probs, yours.tokens, yours.token_log_probs)
        for mine, yours in zip(one.hypotheses, other.hypotheses, strict=True)
    )
