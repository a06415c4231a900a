"""Prompts of a decoder-only model: taken in by the chunk, placed by the part, remembered."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Never

import pytest

from beamline.serving.backends import prefill_cache
from beamline.serving.backends.host import HostMemory
from beamline.serving.backends.slots import Memory
from beamline.serving.contract.backend import PromptChunk
from beamline.serving.engine import chunked_prefill as prompts
from beamline.serving.errors import Cancelled, ComputeError, DeadlinePassed, InvalidRequest
from tests.support.engines import decode, make_engine, results, slot_views
from tests.support.harness import Harness
from tests.support.lm_requests import BEAM, ENDLESS, FOUR, GREEDY, SAMPLE, prompt, same
from tests.support.tiny_lm import CONTEXT, TinyModel


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
        together.step()
    together.finish()
    for number, expected in zip(numbers, alone, strict=True):
        assert same(together.result(number), expected)


@pytest.mark.one_backend("where the engine runs ahead, a step may bring two tokens")
def test_a_long_prompt_does_not_stop_the_others(harness: Harness) -> None:
    """Everybody who decodes gets a token at every step while a prompt of hundreds of tokens is taken in."""
    running = [harness.submit(prompt(5, seed), replace(ENDLESS, max_length=200, min_length=200)) for seed in range(3)]
    harness.step()
    late = harness.submit(prompt(300), GREEDY)
    before = len(harness.stats)
    told = Counter({number: len(harness.pieces[number]) for number in running})
    while not harness.pieces[late] and late not in harness.answers:
        harness.step()
    steps = len(harness.stats) - before
    assert steps >= 300 // prompts.LARGEST_CHUNK + 1
    assert all(stats.active >= 3 for stats in harness.stats[before:])
    for number in running:
        assert len(harness.pieces[number]) - told[number] == steps


def test_a_prompt_in_preparation_can_be_cancelled_and_be_late(harness: Harness) -> None:
    running = harness.submit(prompt(4), replace(ENDLESS, max_length=100, min_length=100))
    harness.step()
    cancelled, late = harness.submit(prompt(300), GREEDY), harness.submit(prompt(310), GREEDY, deadline=5.0)
    harness.step()
    assert harness.stats[-1].active == 1
    harness.engine.cancel(cancelled)
    harness.now = 5.0
    harness.step()
    assert isinstance(harness.answers[cancelled], Cancelled)
    assert isinstance(harness.answers[late], DeadlinePassed)
    harness.finish()
    harness.result(running)
    assert harness.engine._scheduler.preparing == []


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


@pytest.mark.one_backend("TensorRT's plans have lengths of their own")
def test_an_operator_may_let_wider_searches_in(tiny_lm: TinyModel, harness: Harness) -> None:
    """What fits into either has the same answer."""
    wide = replace(FOUR, beam_size=8, num_hypotheses=8, max_length=40)
    engine = make_engine(tiny_lm.folder, tiny_lm.manifest, slots=2, cache_entries=2000)
    assert engine.plan.most_entries == 2000
    long = replace(wide, max_length=200, min_length=199)
    with pytest.raises(InvalidRequest, match=r"may need 1691 .* holds 1024 \(cache_entries of its serving.toml\)"):
        harness.submit(prompt(100), long)
    short, answered = results(decode(engine, [(prompt(100), wide), (prompt(100), long)]))
    assert {len(hypothesis.tokens) for hypothesis in answered.hypotheses} <= {198, 199, 200}
    assert same(short, harness.answer(prompt(100), wide))
    with pytest.raises(InvalidRequest, match="may need 2091 cache entries"):
        decode(engine, [(prompt(100), replace(long, max_length=250))])


# -- the prefix cache ----------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_as_a_recent_one_reuses_its_entries(tiny_lm: TinyModel) -> None:
    system = prompt(100)
    questions = [(*system, *prompt(length, seed=9)) for length in (1, 5, 20)]
    expected = [Harness(tiny_lm).answer(question, BEAM) for question in questions]
    harness = Harness(tiny_lm, prefix_cache=1 << 30)
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
    one = Harness(tiny_lm).backend._graphs.cache_length(100) * entry  # plans know a few lengths
    most = 5 * one // 2
    harness = Harness(tiny_lm, prefix_cache=most)
    sizes = []
    for seed in (1, 2, 1, 3):  # the second use of 1 leaves 2 as the oldest
        harness.answer(prompt(101, seed), GREEDY)
        sizes.append(harness.stats[-1].prefix_cache_bytes)
    assert sizes == [one, 2 * one, 2 * one, 2 * one]
    assert harness.answer(prompt(101, 1), GREEDY).cached_tokens == 100
    assert harness.answer(prompt(101, 2), GREEDY).cached_tokens == 0
    harness.answer(prompt(400, 5), GREEDY)  # larger than the whole cache
    assert harness.stats[-1].prefix_cache_bytes <= most


def test_without_a_prefix_cache_nothing_is_kept(harness: Harness) -> None:
    for _ in range(2):
        assert harness.answer(prompt(60), GREEDY).cached_tokens == 0
    assert harness.stats[-1].prefix_cache_bytes == 0


def counted_copies(harness: Harness) -> list[int]:
    """Of what lengths prefixes are made from now on."""
    prefix, lengths = harness.backend.prefix, list[int]()

    def counted(memory: Memory, length: int) -> tuple[Memory, int]:
        lengths.append(length)
        return prefix(memory, length)

    harness.backend.prefix = counted  # type: ignore[method-assign]
    return lengths


def test_a_prompt_that_the_prefix_cache_could_not_hold_is_not_copied_for_it(tiny_lm: TinyModel) -> None:
    harness = Harness(tiny_lm, prefix_cache=10_000)  # some twenty tokens
    lengths = counted_copies(harness)
    number, other = harness.submit(prompt(100, seed=1), GREEDY), harness.submit(prompt(101, seed=2), GREEDY)
    harness.finish()
    assert lengths == []
    assert harness.stats[-1].prefix_cache_bytes == 0
    assert same(harness.result(number), Harness(tiny_lm).answer(prompt(100, seed=1), GREEDY))
    assert same(harness.result(other), Harness(tiny_lm).answer(prompt(101, seed=2), GREEDY))


def test_a_short_beginning_of_a_long_prompt_is_copied_once(tiny_lm: TinyModel) -> None:
    """To where it is continued; what is known of it is only read."""
    late = (*prompt(300)[:40], *prompt(60, seed=9))
    expected = Harness(tiny_lm).answer(late, BEAM)
    harness = Harness(tiny_lm, prefix_cache=1 << 30)
    harness.answer(prompt(300), GREEDY)
    lengths = counted_copies(harness)
    found = harness.answer(late, BEAM)
    assert found.cached_tokens == 40
    assert lengths == [99]  # what is kept of it
    assert same(found, expected)


# -- on the way into a slot ----------------------------------------------------------------------------------------


@pytest.mark.one_backend("a GPU copies beside the host")
def test_a_long_prompt_is_placed_by_the_part_while_others_run(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the others get their tokens, some of them leave, and caches are laid out anew."""
    late = prompt(300)
    expected = Harness(tiny_lm).answer(late, BEAM)
    monkeypatch.setattr(HostMemory, "part", 1)  # each of the four tensors is a part
    harness = Harness(tiny_lm, slots=5)
    lengths = range(3, 40)
    waiting = [(prompt(3, seed), replace(ENDLESS, max_length=n, min_length=n)) for seed, n in enumerate(lengths)]
    asked = [harness.submit(*each) for each in waiting[:4]]
    harness.step()
    number = harness.submit(late, BEAM)
    held = set()
    while number not in harness.answers:
        if len(asked) - len(harness.answers) < 3 and len(asked) < len(waiting):
            asked.append(harness.submit(*waiting[len(asked)]))
        harness.step()
        held.add(harness.engine._placement.rows)
    assert len(held) > 1  # it was on the way during some steps
    assert same(harness.result(number), expected)
    harness.finish()
    for asked_number, (source, options) in zip(asked, waiting, strict=False):
        assert same(harness.result(asked_number), Harness(tiny_lm).answer(source, options))


@pytest.mark.one_backend("a GPU copies beside the host")
def test_a_prompt_that_is_cancelled_on_the_way_leaves_nothing(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "part", 1)
    harness = Harness(tiny_lm)
    running = harness.submit(prompt(4), replace(ENDLESS, max_length=200, min_length=200))
    harness.step()
    cancelled = harness.submit(prompt(100), GREEDY)
    while not harness.engine._placement.rows:
        harness.step()
    harness.engine.cancel(cancelled)
    harness.step()
    assert isinstance(harness.answers[cancelled], Cancelled)
    assert (harness.engine._placement.rows, harness.engine._placement.requests) == (0, [])
    assert same(harness.answer(prompt(60), BEAM), Harness(tiny_lm).answer(prompt(60), BEAM))
    harness.result(running)


@pytest.mark.one_backend("a GPU copies beside the host")
def test_a_prompt_on_the_way_begins_anew_where_the_slots_were_lost(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are laid out anew when a step begins, and that may fail half-way."""
    late = prompt(100)
    expected = Harness(tiny_lm).answer(late, BEAM)
    monkeypatch.setattr(HostMemory, "part", 1)
    harness = Harness(tiny_lm)
    running = harness.submit(prompt(4), replace(ENDLESS, max_length=200, min_length=200))
    harness.step()
    number = harness.submit(late, BEAM)
    while not harness.engine._placement.rows:
        harness.step()

    def lose(parts: object) -> Never:
        for view in slot_views(harness.backend).values():
            view.fill(1)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine, "_launch_or_refuse", lose)
        harness.step()
    assert isinstance(harness.answers[running], ComputeError)
    harness.finish()
    assert same(harness.result(number), expected)


@pytest.mark.one_backend("a GPU's memory is there from the beginning")
@pytest.mark.parametrize("known", [0, 40, 100, 250])
def test_room_for_a_prompt_is_made_by_the_part_while_others_run(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """Three times, or once for all that is known of it; one of those who came with it goes away meanwhile."""
    late = prompt(300)
    expected = Harness(tiny_lm).answer(late, BEAM)
    monkeypatch.setattr(HostMemory, "part", 1)
    monkeypatch.setattr(prefill_cache, "_FIRST_ENTRIES", 64)
    harness = Harness(tiny_lm, prefix_cache=10 << 20)
    if known:
        harness.answer(late[:known], GREEDY)
    running = harness.submit(prompt(4), replace(ENDLESS, max_length=400, min_length=400))
    harness.step()
    grow, parts = harness.backend.grow, list[bool]()

    def counted(memories: list[object], entries: int) -> bool:
        parts.append(grow(memories, entries))  # type: ignore[arg-type]
        return parts[-1]

    harness.backend.grow = counted  # type: ignore[method-assign,assignment]
    number, leaving = harness.submit(late, BEAM), harness.submit((7, *prompt(299)), BEAM)
    while parts.count(False) < 3:
        harness.step()
    harness.engine.cancel(leaving)
    harness.finish()
    assert same(harness.result(number), expected)
    assert harness.result(number).cached_tokens == max(0, known - 1)
    assert len(harness.result(running).hypotheses[0].tokens) == 399


def test_prompts_that_came_together_go_apart_while_others_wait(tiny_lm: TinyModel) -> None:
    """Sixteen rows of even four tokens would be a long pause."""
    crowd = [prompt(60 + length, seed=2) for length in range(6)]
    expected = [Harness(tiny_lm).answer(source, GREEDY) for source in crowd]
    harness = Harness(tiny_lm)
    harness.submit(prompt(4), replace(ENDLESS, max_length=200, min_length=200))
    harness.step()
    sizes = Counter[tuple[int, ...]]()
    take_in = harness.backend.take_in

    def counted(memories: list[object], chunk: PromptChunk) -> None:
        sizes[chunk.tokens.shape] += 1
        take_in(memories, chunk)  # type: ignore[arg-type]

    harness.backend.take_in = counted  # type: ignore[method-assign,assignment]
    numbers = [harness.submit(source, GREEDY) for source in crowd]
    harness.finish()
    assert max(sizes) == (1, 4)
    for number, result in zip(numbers, expected, strict=True):
        assert same(harness.result(number), result)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_different_lengths_survive_any_pace(
    tiny_lm: TinyModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They are split however it comes, also where the shorter ones are through already."""
    chance = random.Random(seed)
    monkeypatch.setattr(prompts.Pace, "tokens", lambda self, others_wait: chance.randint(1, 60))
    crowd = [prompt(chance.randint(1, 60), seed=number) for number in range(16)]
    harness = Harness(tiny_lm, slots=16)
    numbers = [harness.submit(source, GREEDY) for source in crowd]
    harness.finish()
    for number, source in zip(numbers, crowd, strict=True):
        assert same(harness.result(number), Harness(tiny_lm).answer(source, GREEDY))
