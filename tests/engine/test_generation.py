"""The engine over a decoder-only model: prompts in chunks, samples, what is told before the end, the prefix cache."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
import torch

from serving.backends.base import PromptChunk
from serving.backends.onnxruntime import OnnxRuntimeBackend
from serving.engine import prompts
from serving.engine.request import DecodingOptions, FinishReason, Piece, Request, Result
from serving.engine.stats import StepStats
from serving.errors import Cancelled, ComputeError, DeadlinePassed, InvalidRequest
from tests.support.engines import Answer, arenas, make_engine
from tests.support.plain_search import plain_search
from tests.support.ties import same_or_tie
from tests.support.tiny_lm import CONTEXT, EOS, VOCABULARY, TinyModel

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


@pytest.fixture
def harness(tiny_lm: TinyModel) -> Harness:
    return Harness(tiny_lm)


def same(one: Result, other: Result) -> bool:
    return all(
        same_or_tie(mine.tokens, mine.token_log_probs, yours.tokens, yours.token_log_probs)
        for mine, yours in zip(one.hypotheses, other.hypotheses, strict=True)
    )


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


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [8, 24])
def test_an_answer_does_not_depend_on_chunks_or_neighbours(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Alone and in one chunk; in a crowd that joins by and by, in small ones."""
    choices = (GREEDY, BEAM, SAMPLE, replace(FOUR, seed=5), replace(GREEDY, repetition_penalty=1.3))
    crowd = [(prompt(length, seed=1), choices[length % 5]) for length in (1, 2, 7, 8, 9, 30, 31, 33, 100, 101, 200, 3)]
    alone = [Harness(tiny_lm).answer(source, options) for source, options in crowd]
    monkeypatch.setattr(prompts, "LARGEST_CHUNK", chunk)
    together = Harness(tiny_lm, slots=5)
    numbers = []
    for source, options in crowd:
        numbers.append(together.submit(source, options))
        together.engine.step()
    together.finish()
    for number, expected in zip(numbers, alone, strict=True):
        assert same(together.result(number), expected)


@pytest.mark.one_backend("where the engine runs ahead, a step may bring two tokens")
def test_a_long_prompt_does_not_stop_the_others(harness: Harness) -> None:
    """Everybody who decodes gets a token at every step while a prompt of hundreds of tokens is taken in."""
    running = [harness.submit(prompt(5, seed), replace(ENDLESS, max_length=200, min_length=200)) for seed in range(3)]
    harness.engine.step()
    late = harness.submit(prompt(400), GREEDY)
    before = len(harness.stats)
    told = Counter({number: len(harness.pieces[number]) for number in running})
    while not harness.pieces[late] and late not in harness.answers:
        harness.engine.step()
    steps = len(harness.stats) - before
    assert steps >= 400 // prompts.LARGEST_CHUNK + 1
    assert all(stats.active >= 3 for stats in harness.stats[before:])
    for number in running:
        assert len(harness.pieces[number]) - told[number] == steps


def test_a_chunk_takes_about_as_long_as_a_step() -> None:
    """A device where the weights' reading costs as much as ten tokens."""
    pace = prompts.Pace()
    step = 0.030
    for _ in range(30):
        pace.stepped(step)
        tokens = pace.tokens(others_wait=True)
        pace.took(tokens, 0.020 + 0.002 * tokens)
    assert 0.020 + 0.002 * pace.tokens(others_wait=True) < 2 * step
    assert pace.tokens(others_wait=False) == prompts.LARGEST_CHUNK


def test_a_prompt_in_preparation_can_be_cancelled_and_be_late(harness: Harness) -> None:
    running = harness.submit(prompt(4), replace(ENDLESS, max_length=100, min_length=100))
    harness.engine.step()
    cancelled, late = harness.submit(prompt(300), GREEDY), harness.submit(prompt(310), GREEDY, deadline=5.0)
    harness.engine.step()
    assert harness.stats[-1].active == 1
    harness.engine.cancel(cancelled)
    harness.now = 5.0
    harness.engine.step()
    assert isinstance(harness.answers[cancelled], Cancelled)
    assert isinstance(harness.answers[late], DeadlinePassed)
    harness.finish()
    harness.result(running)
    assert harness.engine._scheduler.preparing == 0


def test_a_prompt_that_breaks_the_device_fails_alone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    take_in = harness.backend.take_in

    def picky(memories: list[object], chunk: PromptChunk) -> None:
        if (chunk.tokens == 13).any():
            raise RuntimeError("poisoned")
        take_in(memories, chunk)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.backend, "take_in", picky)
    good = [harness.submit((5, 6, 7, 8 + seed, 9), GREEDY) for seed in range(3)]
    bad = harness.submit((5, 6, 13, 7, 9), GREEDY)
    harness.finish()
    assert isinstance(harness.answers[bad], ComputeError)
    for number in good:
        harness.result(number)


def test_what_can_never_fit_is_refused(tiny_lm: TinyModel, harness: Harness) -> None:
    wide = replace(FOUR, beam_size=8, num_hypotheses=8, max_length=CONTEXT - 100)
    with pytest.raises(InvalidRequest, match=r"may need 3387 cache entries .* holds 1024"):
        harness.submit(prompt(100), wide)
    assert harness.answer(prompt(200), replace(wide, max_length=100, min_length=100)).hypotheses


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.one_backend("where the engine runs ahead, the next entries are written already")
@pytest.mark.parametrize("options", [FOUR, replace(BEAM, min_length=25)], ids=["samples", "beams"])
def test_four_of_one_prompt_cost_one_prompts_memory(harness: Harness, options: DecodingOptions) -> None:
    harness.submit(prompt(101), options)
    while not harness.stats or not harness.stats[-1].active:
        harness.engine.step()
    assert harness.stats[-1].live_entries == 100 + 4
    for _ in range(4):
        harness.engine.step()
    assert harness.stats[-1].live_entries == 100 + 4 * 5
    keys = arenas(harness.engine)["cache_key_0"][0]  # the row itself: entries beyond are still zero
    assert keys[:, :120].any(axis=(0, 2)).all()
    assert not keys[:, 120:].any()


@pytest.mark.one_backend("it asks for a cache length that no plan has")
def test_compaction_keeps_the_prompt(tiny_lm: TinyModel) -> None:
    """Long beams after a prompt fill their bucket; dead branches are cut, and the answer stays."""
    options = replace(BEAM, beam_size=8, num_hypotheses=8, max_length=90, min_length=90)
    crowded, roomy = Harness(tiny_lm), Harness(tiny_lm)
    roomy.engine._room._cache_length = lambda needed, beams, compacted: 1024  # type: ignore[method-assign]
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
        joining.engine.step()
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
    harness = Harness(tiny_lm, slots=8, cache=1 << 20)
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
        harness.engine.step()
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
        harness.engine.step()
        told = harness.pieces[number][before:]
        decoded = harness.stats[-1].active == 1 and number not in harness.answers
        assert [len(piece.tokens) for piece in told] == ([1] if decoded else [])


def test_whoever_has_seen_enough_stops_one_sample_or_a_whole_search(harness: Harness) -> None:
    samples, beams = harness.submit(prompt(5), FOUR), harness.submit(prompt(6), replace(BEAM, min_length=25))
    for _ in range(5):
        harness.engine.step()
    harness.engine.enough(samples, 2)
    harness.engine.enough(beams)
    harness.engine.enough(99999)
    harness.engine.step()
    assert harness.result(beams).hypotheses[0].finish_reason is FinishReason.STOP
    assert harness.pieces[samples][-3].finish_reason is None
    harness.finish()
    reasons = [each.finish_reason for each in harness.result(samples).hypotheses]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert len(harness.result(samples).hypotheses[2].tokens) < 10


# -- the prefix cache ----------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_as_a_recent_one_reuses_its_entries(tiny_lm: TinyModel) -> None:
    system = prompt(100)
    questions = [(*system, *prompt(length, seed=9)) for length in (1, 5, 20)]
    expected = [Harness(tiny_lm).answer(question, BEAM) for question in questions]
    harness = Harness(tiny_lm, cache=1 << 30)
    found = [harness.answer(question, BEAM) for question in questions]
    again = harness.answer(questions[1], BEAM)
    assert [each.cached_tokens for each in found] == [0, 100, 100]
    assert again.cached_tokens == 104  # all but the last token, which a step takes in
    for mine, other in zip([*found, again], [*expected, expected[1]], strict=True):
        assert same(mine, other)
    assert sum(stats.cached_prompt_tokens for stats in harness.stats) == 304
    assert sum(stats.prompt_tokens for stats in harness.stats) == 101 + 105 + 120 + 105


def test_the_prefix_cache_is_bounded_and_forgets_what_is_oldest(tiny_lm: TinyModel) -> None:
    entry = 2 * 2 * 32 * 4  # layers, keys and values, width, bytes
    harness = Harness(tiny_lm, cache=250 * entry)
    sizes = []
    for seed in (1, 2, 1, 3):  # the second use of 1 leaves 2 as the oldest
        harness.answer(prompt(101, seed), GREEDY)
        sizes.append(harness.stats[-1].prefix_cache_bytes)
    assert sizes == [100 * entry, 200 * entry, 200 * entry, 200 * entry]
    assert harness.answer(prompt(101, 1), GREEDY).cached_tokens == 100
    assert harness.answer(prompt(101, 2), GREEDY).cached_tokens == 0
    harness.answer(prompt(400, 5), GREEDY)  # larger than the whole cache
    assert harness.stats[-1].prefix_cache_bytes <= 250 * entry


def test_without_a_prefix_cache_nothing_is_kept(harness: Harness) -> None:
    for _ in range(2):
        assert harness.answer(prompt(60), GREEDY).cached_tokens == 0
    assert harness.stats[-1].prefix_cache_bytes == 0
