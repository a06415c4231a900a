"""The host's half of the search over a made-up model, in microseconds a step.

The model is a table: the log-probabilities of the next word depend on the last word and the depth. The device's half is
played by the functions that end the step graph. The oracle is Hugging Face's algorithm once more, written down as
plainly as possible: whole sequences in lists, no trees, no caches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from beamline.converters.modules.search.beam_search import Edits, best_candidates, force, log_probabilities, next_beams
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis
from beamline.serving.engine.search.beam_search import BeamSearch, StepView
from tests.support.traces import best_finished, check_shape, replayed

WORDS = 40
START = 0
DEAD = -1e9


@dataclass(frozen=True)
class Table:
    """log_probs[depth, last word, next word]"""

    log_probs: Tensor
    eos_ids: tuple[int, ...]

    @classmethod
    def make(cls, seed: int, eos_ids: tuple[int, ...], depth: int, eagerness: float) -> Table:
        chance = torch.Generator().manual_seed(seed)
        logits = torch.randn(depth, WORDS, WORDS, generator=chance) * 2
        logits[:, :, list(eos_ids)] += eagerness
        return cls(logits.log_softmax(-1), eos_ids)


@dataclass(frozen=True)
class Ended:
    score: float
    tokens: tuple[int, ...]


def oracle(table: Table, options: DecodingOptions) -> list[Ended]:
    """Hugging Face's `_beam_search`, for one sentence; `_sample` without sampling where there is one beam."""
    width, prompt = options.beam_size, [START, *options.prefix]
    per_beam = max(2, 1 + len(table.eos_ids))
    running: list[tuple[float, list[int]]] = [(0.0, prompt)] + [(DEAD, prompt)] * (width - 1)
    finished: list[Ended] = []
    length = len(prompt)
    while True:
        candidates = [
            (score + float(table.log_probs[length - 1, sequence[-1], word]), [*sequence, word])
            for score, sequence in running
            for word in range(WORDS)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        best = candidates[: per_beam * width]
        stops = [sequence[-1] in table.eos_ids or length + 1 >= options.max_length for _, sequence in best]
        generated = length + 1 - len(prompt)
        for (score, sequence), stop in list(zip(best, stops, strict=True))[:width]:
            if stop and score > DEAD / 2:
                finished.append(Ended(score / generated**options.length_penalty, tuple(sequence[len(prompt) :])))
        finished = sorted(finished, key=lambda ended: -ended.score)[:width]
        running = [candidate for candidate, stop in zip(best, stops, strict=True) if not stop][:width]
        length += 1
        if all(stops):
            return finished
        full = len(finished) == width
        if full and (width == 1 or options.early_stopping is True):
            return finished
        longest = options.max_length - len(prompt)
        hopeful = longest if options.early_stopping == "never" and options.length_penalty > 0 else generated
        if full and running[0][0] / hopeful**options.length_penalty <= finished[-1].score:
            return finished


class Device:
    """What a backend does with a step graph, for one request in a batch that may be wider than it."""

    def __init__(self, table: Table, options: DecodingOptions, beams: int) -> None:
        self.table = table
        self.width = torch.tensor([options.beam_size])
        self.tokens = torch.full((1, beams), START)
        self.scores = torch.full((1, beams), DEAD)
        self.scores[0, 0] = 0
        self.depth = 0

    def step(self, forced: int | None) -> StepView:
        beams = self.tokens.shape[1]
        logits = self.table.log_probs[self.depth][self.tokens]  # [1, K, V]
        nothing = torch.zeros(1, beams, 0)
        edits = Edits(nothing.long(), nothing, nothing)
        log_probs = log_probabilities(logits, edits, self.width == 1, renormalise=False)
        found = best_candidates(log_probs, self.scores, max(2, 1 + len(self.table.eos_ids)))
        alive = next_beams(found, self.table.eos_ids, self.width, beams)
        alive = force(alive, self.scores, torch.tensor([-1 if forced is None else forced]))
        self.tokens, self.scores = alive.tokens, alive.scores
        self.depth += 1
        width = int(self.width)
        return StepView(
            alive.tokens[0, :width].tolist(),
            alive.parents[0, :width].tolist(),
            alive.scores[0, :width].tolist(),
            found.scores[0].tolist(),
            found.tokens[0].tolist(),
            found.parents[0].tolist(),
        )


def close(found: Hypothesis, expected: Ended) -> bool:
    return abs(found.score - expected.score) < 1e-4


@st.composite
def problems(draw: st.DrawFn, most_beams: int = 6) -> tuple[Table, DecodingOptions, int]:
    eos_ids = draw(st.sampled_from([(1,), (1, 2), (1, 2, 3)])) if most_beams <= 6 else (1,)
    width = draw(st.integers(1, most_beams))
    prefix = tuple(draw(st.lists(st.integers(4, WORDS - 1), max_size=3)))
    max_length = draw(st.integers(len(prefix) + 2, 14))
    options = DecodingOptions(
        beam_size=width,
        num_hypotheses=width,
        max_length=max_length,
        prefix=prefix,
        length_penalty=draw(st.sampled_from([1.0, 0.0, 0.6, 2.0, -1.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
    )
    table = Table.make(draw(st.integers(0, 10_000)), eos_ids, max_length, draw(st.sampled_from([-2.0, 0.0, 1.0, 3.0])))
    return table, options, draw(st.integers(width, max(width, 6)))


@settings(max_examples=300)
@given(problems())
def test_the_same_as_the_plain_algorithm(problem: tuple[Table, DecodingOptions, int]) -> None:
    table, options, beams = problem
    search = BeamSearch(options, START, table.eos_ids)
    device = Device(table, options, beams)
    while not search.done:
        search.advance(device.step(search.forced_token()))
    expected = oracle(table, options)
    found = search.hypotheses()
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert close(mine, other), f"{mine} is not {other}"
        assert sum(mine.token_log_probs) / len(mine.tokens) ** options.length_penalty == pytest.approx(
            mine.score, abs=1e-3
        )
        ends = mine.tokens[-1] in table.eos_ids
        assert mine.finish_reason is (FinishReason.EOS if ends else FinishReason.LENGTH)
    assert [mine.tokens for mine in found] == [other.tokens for other in expected] or _has_ties(expected)


def _has_ties(expected: list[Ended]) -> bool:
    scores = [ended.score for ended in expected]
    return any(abs(a - b) < 1e-4 for a, b in pairwise(scores))


@settings(max_examples=150)
@given(problems(), st.integers(0, 1000))
def test_compaction_keeps_every_living_beams_past(problem: tuple[Table, DecodingOptions, int], seed: int) -> None:
    """A cache of tokens instead of keys: after any compaction, the entries that live are exactly the beams' words."""
    table, options, beams = problem
    chance = random.Random(seed)
    search = BeamSearch(options, START, table.eos_ids)
    device = Device(table, options, beams)
    cache: list[int] = []
    sequences = [[START]] * options.beam_size
    while not search.done:
        inputs = [sequence[-1] for sequence in sequences]
        assert len(cache) == search.used_entries
        cache += inputs
        search.advance(device.step(search.forced_token()))
        keep = search.live_entries()
        for parents, tokens in search.levels(len(sequences[0]) - 1):
            sequences = [[*sequences[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        pasts = [sequence[:-1] for sequence in sequences]
        assert keep == sorted(set(keep))
        living = {word for past in pasts for word in past}
        assert {cache[entry] for entry in keep} <= living
        distinct = {tuple(past[: depth + 1]) for past in pasts for depth in range(len(past))}
        assert len(keep) <= len(distinct)
        if chance.random() < 0.4:
            cache = [cache[entry] for entry in keep]
            search.compacted(keep)
            assert search.live_entries() == list(range(len(keep)))


@settings(max_examples=100)
@given(problems(), st.integers(0, 12))
def test_time_over_gives_whole_sequences(problem: tuple[Table, DecodingOptions, int], steps: int) -> None:
    table, options, beams = problem
    search = BeamSearch(options, START, table.eos_ids)
    device = Device(table, options, beams)
    for _ in range(steps):
        if not search.done:
            search.advance(device.step(search.forced_token()))
    assume(not search.done)
    search.stop()
    assert search.done
    for hypothesis in search.hypotheses():
        assert len(hypothesis.tokens) == len(hypothesis.token_log_probs)
        if hypothesis.finish_reason is FinishReason.TIME_LIMIT:
            assert not set(hypothesis.tokens) & set(table.eos_ids)


@settings(max_examples=150)
@given(problems(most_beams=16), st.integers(3, 20))  # beyond the prefix
def test_a_trace_replayed_gives_the_hypotheses(problem: tuple[Table, DecodingOptions, int], steps: int) -> None:
    table, options, beams = problem
    plain = BeamSearch(options, START, table.eos_ids)
    traced = BeamSearch(replace(options, trace_candidates=10_000), START, table.eos_ids)
    for search in (plain, traced):
        device = Device(table, options, beams)
        for _ in range(steps):
            if not search.done:
                search.advance(device.step(search.forced_token()))
        if not search.done:
            search.stop()
    hypotheses, trace = traced.hypotheses(), traced.trace()
    assert hypotheses == plain.hypotheses()
    assert plain.trace() is None
    assert trace is not None
    assert not trace.truncated
    check_shape(trace, trace.steps, max(2, 1 + len(table.eos_ids)))
    found = replayed(trace, trace.steps)
    assert [each.tokens for each in found] == [(*options.prefix, *each.tokens) for each in hypotheses]
    assert [each.score for each in found] == [each.score for each in hypotheses]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in hypotheses]
    last = trace.steps[-1].candidates
    if all(each.finish_reason is not FinishReason.TIME_LIMIT for each in last):  # else whole ones go first
        assert best_finished(trace, trace.steps) == list(trace.ends)


@settings(max_examples=50)
@given(problems(), st.integers(1, 60))
def test_a_trace_ends_at_its_limit(problem: tuple[Table, DecodingOptions, int], limit: int) -> None:
    table, options, beams = problem
    search = BeamSearch(replace(options, trace_candidates=limit), START, table.eos_ids)
    device = Device(table, options, beams)
    while not search.done:
        search.advance(device.step(search.forced_token()))
    trace = search.trace()
    assert trace is not None
    assert sum(len(step.candidates) for step in trace.steps) <= limit
    assert [step.number for step in trace.steps] == list(range(len(trace.steps)))
    assert trace.truncated or len(trace.ends) == len(search.hypotheses())
    replayed(trace, trace.steps)  # those that are named are there
