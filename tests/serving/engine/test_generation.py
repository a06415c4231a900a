"""The engine over a decoder-only model: its own answers, memory, samples, what is told before the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason
from tests.support.engines import arenas
from tests.support.harness import Harness
from tests.support.lm_requests import BEAM, ENDLESS, FOUR, GREEDY, SAMPLE, prompt, same
from tests.support.plain_search import plain_search
from tests.support.ties import same_or_tie
from tests.support.tiny_lm import EOS, TinyModel
from tests.support.traces import check_shape, replayed

# -- the model's own answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, BEAM, replace(BEAM, length_penalty=0.0)], ids=["greedy", "beam", "sum"])
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_a_prompt_is_continued_as_the_plain_algorithm_does(
    tiny_lm: TinyModel, harness: Harness, options: DecodingOptions, length: int
) -> None:
    source = prompt(length)

    @torch.no_grad()
    def log_probs(sequences: list[list[int]]) -> torch.Tensor:
        logits: torch.Tensor = tiny_lm.original(torch.tensor([[*source[:-1], *each] for each in sequences]))
        return logits[:, -1].log_softmax(-1)

    expected = plain_search(log_probs, options, source[-1], EOS)
    found = harness.answer(source, options)
    for mine, other in zip(found.hypotheses, expected, strict=True):
        assert same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.log_probs)
        assert mine.score == pytest.approx(other.score, abs=1e-4)


def test_scores_are_the_models_log_probabilities(tiny_lm: TinyModel, harness: Harness) -> None:
    source = prompt(20)
    options = replace(FOUR, temperature=0.7, top_k=9, top_log_probs=3)
    for hypothesis in harness.answer(source, options).hypotheses:
        whole = torch.tensor([[*source, *hypothesis.tokens]])
        with torch.no_grad():
            rows = tiny_lm.original(whole)[0, len(source) - 1 : -1].log_softmax(-1)
        rows[:-1, EOS] = -torch.inf  # forbidden until the last place, by the least length
        rows = rows.log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(hypothesis.tokens)[:, None])[:, 0]
        assert hypothesis.token_log_probs == pytest.approx(chosen.tolist(), abs=1e-3)
        best = rows.topk(3)
        assert [[token for token, _ in each] for each in hypothesis.alternatives] == best.indices.tolist()
        for each, values in zip(hypothesis.alternatives, best.values.tolist(), strict=True):
            assert [value for _, value in each] == pytest.approx(values, abs=1e-3)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.one_backend("where the engine runs ahead, the next entries are written already")
@pytest.mark.parametrize("options", [FOUR, replace(BEAM, min_length=25)], ids=["samples", "beams"])
def test_four_of_one_prompt_cost_one_prompts_memory(harness: Harness, options: DecodingOptions) -> None:
    harness.submit(prompt(101), options)
    while not harness.stats or not harness.stats[-1].active:
        harness.step()
    assert harness.stats[-1].live_entries == 100 + 4
    for _ in range(4):
        harness.step()
    assert harness.stats[-1].live_entries == 100 + 4 * 5
    keys = arenas(harness.engine)["cache_key_0"][0]  # the row itself: entries beyond are still zero
    assert keys[:, :120].any(axis=(0, 2)).all()
    assert not keys[:, 120:].any()


@pytest.mark.one_backend("it asks for a cache length that no plan has")
def test_compaction_keeps_the_prompt(tiny_lm: TinyModel) -> None:
    """Long beams after a prompt fill their bucket; dead branches are cut, and the answer stays."""
    options = replace(BEAM, beam_size=8, num_hypotheses=8, max_length=90, min_length=90)
    crowded, roomy = Harness(tiny_lm), Harness(tiny_lm)
    roomy.engine._capacity._cache_length = lambda needed, beams, compacted: 1024  # type: ignore[method-assign]
    roomy.engine._capacity._compact = lambda slot, search, most: False  # type: ignore[method-assign]
    found, expected = crowded.answer(prompt(50), options), roomy.answer(prompt(50), options)
    assert sum(stats.compactions for stats in crowded.stats) > 0
    assert sum(stats.compactions for stats in roomy.stats) == 0
    assert same(found, expected)


# -- samples -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_alone_in_a_full_batch_and_joining(tiny_lm: TinyModel) -> None:
    mine = (prompt(30), replace(SAMPLE, beam_size=3, num_hypotheses=3, top_p=0.95, max_length=40))
    alone = Harness(tiny_lm).answer(*mine)
    others = [
        (prompt(length), replace(options, seed=length))
        for length, options in zip(range(3, 45, 6), (FOUR, BEAM, GREEDY, SAMPLE) * 2, strict=False)
    ]
    full = Harness(tiny_lm)
    numbers = [full.submit(*each) for each in [*others[:4], mine, *others[4:]]]
    full.finish()
    joining = Harness(tiny_lm)
    for each in others:
        joining.submit(*each)
    for _ in range(7):
        joining.step()
    number = joining.submit(*mine)
    joining.finish()
    for found in (full.result(numbers[4]), joining.result(number)):
        assert [each.tokens for each in found.hypotheses] == [each.tokens for each in alone.hypotheses]
    assert len({each.tokens for each in alone.hypotheses}) == 3
    other = Harness(tiny_lm).answer(mine[0], replace(mine[1], seed=12))
    assert [each.tokens for each in other.hypotheses] != [each.tokens for each in alone.hypotheses]


def test_the_engines_samples_follow_the_models_distribution(tiny_lm: TinyModel) -> None:
    """800 first words, through graph and engine, in batches; the temperature as well as the filter are in it."""
    source = prompt(12)
    with torch.no_grad():
        logits = tiny_lm.original(torch.tensor([source]))[0, -1]
    best = (logits / 1.5).topk(6)
    shares = dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))
    harness = Harness(tiny_lm, slots=8, prefix_cache=1 << 20)
    options = replace(FOUR, beam_size=8, num_hypotheses=8, temperature=1.5, top_k=6, max_length=2, min_length=0)
    numbers = [harness.submit(source, replace(options, seed=seed)) for seed in range(100)]
    harness.finish()
    counts = Counter(each.tokens[0] for number in numbers for each in harness.result(number).hypotheses)
    assert set(counts) <= set(shares)
    statistic = sum((counts[word] - 800 * share) ** 2 / (800 * share) for word, share in shares.items())
    assert statistic < 20.5  # five degrees of freedom: chance exceeds this once in a thousand times


def test_samples_end_each_at_its_own_time(harness: Harness) -> None:
    eager = replace(SAMPLE, beam_size=8, num_hypotheses=8, max_length=80, logit_bias=((EOS, 2.5),))
    found = harness.answer(prompt(10), eager)
    lengths = {len(each.tokens) for each in found.hypotheses}
    assert len(lengths) > 3
    for each in found.hypotheses:
        ends = each.tokens[-1] == EOS
        assert each.finish_reason is (FinishReason.EOS if ends else FinishReason.LENGTH)
        assert EOS not in each.tokens[:-1]


def test_penalties_and_bias_reach_the_samples(harness: Harness) -> None:
    source = prompt(10)
    plain = replace(FOUR, temperature=0.3, max_length=40, min_length=40)

    def repeated(options: DecodingOptions) -> int:
        return sum(len(each.tokens) - len(set(each.tokens)) for each in harness.answer(source, options).hypotheses)

    assert repeated(replace(plain, presence_penalty=2.0, frequency_penalty=2.0)) < repeated(plain)
    assert repeated(replace(plain, frequency_penalty=100.0)) == 0
    biased = harness.answer(source, replace(plain, logit_bias=((77, 50.0),)))
    assert all(set(each.tokens[:-1]) == {77} for each in biased.hypotheses)
    banned = harness.answer(source, replace(plain, logit_bias=((77, 50.0), (77, -100.0))))
    assert all(77 not in each.tokens for each in banned.hypotheses)


# -- what is told before the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [GREEDY, BEAM, replace(BEAM, beam_size=8, num_hypotheses=1, length_penalty=2.0), FOUR, replace(SAMPLE, seed=8)],
    ids=["greedy", "beam", "wide", "samples", "sample"],
)
def test_nothing_that_was_told_is_taken_back(harness: Harness, options: DecodingOptions) -> None:
    numbers = [harness.submit(prompt(10, seed), replace(options, max_length=40)) for seed in range(8)]
    early = 0
    while harness.engine.busy:
        harness.step()
    for number in numbers:
        hypotheses = harness.result(number).hypotheses
        for index, hypothesis in enumerate(hypotheses):
            pieces = [piece for piece in harness.pieces[number] if piece.index == index]
            told = tuple(token for piece in pieces for token in piece.tokens)
            values = [value for piece in pieces for value in piece.token_log_probs]
            assert hypothesis.tokens[: len(told)] == told
            assert values == pytest.approx(hypothesis.token_log_probs[: len(told)], abs=1e-4)
            early += len(told)
    assert early > 0


def test_greedy_tells_every_token_at_its_step(harness: Harness) -> None:
    number = harness.submit(prompt(10), ENDLESS)
    while number not in harness.answers:
        before = len(harness.pieces[number])
        harness.step()
        told = harness.pieces[number][before:]
        decoded = harness.stats[-1].active == 1 and number not in harness.answers
        assert [len(piece.tokens) for piece in told] == ([1] if decoded else [])


def test_whoever_has_seen_enough_stops_one_sample_or_a_whole_search(harness: Harness) -> None:
    samples, beams = harness.submit(prompt(5), FOUR), harness.submit(prompt(6), replace(BEAM, min_length=25))
    for _ in range(5):
        harness.step()
    harness.engine.stop_hypothesis(samples, 2)
    harness.engine.stop_hypothesis(beams)
    harness.engine.stop_hypothesis(99999)
    harness.step()
    assert harness.result(beams).hypotheses[0].finish_reason is FinishReason.STOP
    assert harness.pieces[samples][-3].finish_reason is None
    harness.finish()
    reasons = [each.finish_reason for each in harness.result(samples).hypotheses]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert len(harness.result(samples).hypotheses[2].tokens) < 10


# -- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [GREEDY, BEAM, replace(BEAM, beam_size=8, num_hypotheses=3), SAMPLE, FOUR],
    ids=["greedy", "beam", "8 beams", "sample", "four samples"],
)
def test_a_trace_tells_how_the_answer_came_about(harness: Harness, options: DecodingOptions) -> None:
    plain = harness.answer(prompt(9), options)
    neighbour = harness.submit(prompt(30), replace(BEAM, beam_size=8, num_hypotheses=1))  # a wider batch
    number = harness.submit(prompt(9), replace(options, trace_candidates=10_000))
    harness.finish()
    found, trace = harness.result(number), harness.result(number).trace
    assert harness.result(neighbour).trace is None
    assert not harness.steps[neighbour]
    assert trace is not None
    steps = [*harness.steps[number], *trace.steps]
    assert len(harness.steps[number]) >= 2  # they came as they were made
    check_shape(trace, steps)
    told = replayed(trace, steps)
    assert [each.tokens for each in told] == [each.tokens for each in found.hypotheses]
    assert [each.score for each in told] == pytest.approx([each.score for each in found.hypotheses], abs=1e-5)
    assert [each.finish_reason for each in told] == [each.finish_reason for each in found.hypotheses]
    assert same(plain, found)


def test_a_sample_that_is_stopped_ends_where_its_trace_does(harness: Harness) -> None:
    number = harness.submit(prompt(9), replace(FOUR, trace_candidates=10_000))
    while not any(piece.index == 2 for piece in harness.pieces[number]):
        harness.step()
    harness.engine.stop_hypothesis(number, 2)
    harness.finish()
    trace = harness.result(number).trace
    assert trace is not None
    told = replayed(trace, [*harness.steps[number], *trace.steps])
    assert [each.tokens for each in told] == [each.tokens for each in harness.result(number).hypotheses]
    assert len({len(each.tokens) for each in told}) == 2
