"""The engine over real graphs, without a thread: who joins, leaves, fails or is cut short, and what others notice."""

from __future__ import annotations

import gc
import random
import resource
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from beamline.serving.contract.stats import Outcome
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Result
from beamline.serving.engine.request import deliver
from beamline.serving.errors import (
    Cancelled,
    ComputeError,
    DeadlinePassed,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    ShuttingDown,
)
from tests.support.engines import arenas, decode, make_engine, poison, results, served_by
from tests.support.harness import Harness
from tests.support.marian_shape import EOS, MAX_LENGTH, PAD, MarianShape
from tests.support.ties import same_or_tie

BEAM = DecodingOptions(beam_size=4, num_hypotheses=4, max_length=MAX_LENGTH)
GREEDY = replace(BEAM, beam_size=1, num_hypotheses=1)
LONG = replace(BEAM, min_length=MAX_LENGTH - 1)  # never ends by itself


def crowd(count: int, seed: int) -> list[tuple[list[int], DecodingOptions]]:
    """Mixed lengths, widths and rules."""
    chance = random.Random(seed)
    choices = (
        BEAM,
        GREEDY,
        replace(BEAM, beam_size=8, num_hypotheses=8),
        replace(BEAM, beam_size=2, num_hypotheses=2, no_repeat_ngram_size=2),
        replace(GREEDY, repetition_penalty=1.5),
        replace(BEAM, prefix=(20, 21)),
        replace(BEAM, min_length=20),
    )
    return [
        ([chance.randrange(2, PAD) for _ in range(chance.randint(1, 60))], chance.choice(choices)) for _ in range(count)
    ]


def is_same(found: Result, expected: Result) -> bool:
    return all(
        same_or_tie(mine.tokens, mine.token_log_probs, other.tokens, other.token_log_probs)
        for mine, other in zip(found.hypotheses, expected.hypotheses, strict=True)
    )


def assert_same(found: Result, expected: Result) -> None:
    assert is_same(found, expected), f"{found} is not {expected}"


@pytest.mark.parametrize("stagger", [0, 1, 3])
def test_an_answer_does_not_depend_on_its_neighbours(plain_model: MarianShape, stagger: int) -> None:
    """The same request alone, in a full batch, and joining a running batch."""
    requests = crowd(24, seed=stagger)
    alone = [
        results(decode(make_engine(plain_model.folder, plain_model.manifest), [request]))[0] for request in requests
    ]
    together = results(decode(make_engine(plain_model.folder, plain_model.manifest, slots=8), requests, stagger))
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_an_answer_does_not_depend_on_its_neighbours_at_length(plain_model: MarianShape, seed: int) -> None:
    requests = crowd(48, seed=100 + seed)
    alone = [
        results(decode(make_engine(plain_model.folder, plain_model.manifest), [request]))[0] for request in requests
    ]
    for slots, stagger in ((1, 0), (5, 2), (16, 1), (32, 0)):
        engine = make_engine(plain_model.folder, plain_model.manifest, slots=slots)
        for found, expected in zip(results(decode(engine, requests, stagger)), alone, strict=True):
            assert_same(found, expected)


def test_poison_stays_in_its_slot(plain_model: MarianShape) -> None:
    """NaN in one slot's cache fails that request alone, and the slot's next tenant is clean."""
    harness = Harness(plain_model, slots=3)
    requests = [([5, 6, 7 + n], LONG) for n in range(3)]
    expected = results(decode(make_engine(plain_model.folder, plain_model.manifest), [*requests, ([9, 8], BEAM)]))
    numbers = [harness.submit(source, options) for source, options in requests]
    for _ in range(4):
        harness.step()
    poison(harness.engine, slot=1)
    harness.step()
    if not harness.answers:  # a step was under way already
        harness.step()
    assert isinstance(harness.answers[numbers[1]], ComputeError)
    assert len(harness.answers) == 1
    late = harness.submit([9, 8], BEAM)
    harness.finish()
    for number, want in ((numbers[0], expected[0]), (numbers[2], expected[2]), (late, expected[3])):
        answer = harness.answers[number]
        assert isinstance(answer, Result)
        assert_same(answer, want)
    outcomes = [finished.outcome for stats in harness.stats for finished in stats.finished]
    assert sorted(outcomes) == [Outcome.FAILED, Outcome.OK, Outcome.OK, Outcome.OK]
    for name, values in arenas(harness.engine).items():
        assert np.isfinite(values.astype(np.float32)).all(), name


@pytest.mark.one_backend
@pytest.mark.parametrize("leaving", [(0,), (1,), (4,), (1, 4), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("poisoned", [0, 4])
@pytest.mark.parametrize("kind", [pytest.param("tensorrt-ahead", marks=pytest.mark.full), "cuda"])
def test_poison_of_a_step_in_flight_stays_in_no_slot(
    plain_model: MarianShape, kind: str, poisoned: int, leaving: tuple[int, ...]
) -> None:
    """Whoever had it may be gone when it is seen, or have moved; and idle rows are copies of the first one."""
    with served_by(kind):
        harness = Harness(plain_model, slots=6)
    numbers = [harness.submit([5, 6, 7 + n], LONG) for n in range(5)]
    for _ in range(4):
        harness.step()
    poison(harness.engine, poisoned)
    harness.step()
    assert harness.engine._pipeline.in_flight
    assert not harness.answers
    for place in leaving:
        harness.engine.cancel(numbers[place])
    harness.step()
    assert isinstance(harness.answers[numbers[poisoned]], Cancelled if poisoned in leaving else ComputeError)
    for name, values in arenas(harness.engine).items():
        assert np.isfinite(values.astype(np.float32)).all(), name
    others = set(range(5)) - {*leaving, poisoned}
    late = [harness.submit([9, 8, n], BEAM) for n in range(6 - len(others))]
    harness.finish()
    for number in (*(numbers[place] for place in others), *late):
        assert isinstance(harness.answers[number], Result)


def test_a_cancelled_request_frees_its_slot_at_the_next_step(plain_model: MarianShape) -> None:
    harness = Harness(plain_model, slots=1)
    first, second = harness.submit([5, 6], LONG), harness.submit([7, 8], BEAM)
    harness.step()
    harness.engine.cancel(first)
    harness.engine.cancel(12345)  # nobody
    harness.step()
    assert isinstance(harness.answers[first], Cancelled)
    assert harness.stats[-1].admitted == 1
    harness.finish()
    assert isinstance(harness.answers[second], Result)


def test_a_request_that_moved_says_which_slots_it_had(plain_model: MarianShape) -> None:
    harness = Harness(plain_model, slots=2)
    first, second = harness.submit([5, 6], LONG), harness.submit([7, 8], LONG)
    harness.step()
    assert [(each.slot, each.until) for each in harness.engine.occupied()] == [(0, None), (1, None)]
    harness.engine.cancel(first)
    harness.step()
    before, now = harness.engine.occupied()
    assert (before.slot, before.until, now.slot, now.until) == (1, now.since, 0, None)
    harness.finish()
    gone, answered = (each for stats in harness.stats for each in stats.finished)
    assert [[stay.slot for stay in each.stays] for each in (gone, answered)] == [[0], [1, 0]]
    assert isinstance(harness.answers[second], Result)
    assert sum(stay.seconds for stay in answered.stays) <= answered.total_seconds


def test_a_deadline_ends_waiting_and_running_requests(plain_model: MarianShape) -> None:
    harness = Harness(plain_model, slots=1)
    running = harness.submit([5, 6], LONG, deadline=10.0)
    waiting = harness.submit([5, 7], LONG, deadline=5.0)
    harness.step()
    harness.now = 5.0
    harness.step()
    assert isinstance(harness.answers[waiting], DeadlinePassed)
    assert running not in harness.answers
    harness.now = 10.0
    harness.step()
    assert isinstance(harness.answers[running], DeadlinePassed)
    assert not harness.engine.busy


def test_a_time_limit_gives_the_best_so_far(plain_model: MarianShape) -> None:
    harness = Harness(plain_model)
    number = harness.submit([5, 6, 7], replace(LONG, time_limit=3.0))
    for _ in range(6):
        harness.step()
    harness.now = 3.0
    harness.step()
    answer = harness.answers[number]
    assert isinstance(answer, Result)
    best = answer.hypotheses[0]
    assert best.finish_reason is FinishReason.TIME_LIMIT
    assert len(best.tokens) == len(best.token_log_probs) == 6
    assert best.score == pytest.approx(sum(best.token_log_probs) / 6, abs=1e-4)


def test_a_full_queue_refuses_and_a_draining_engine_too(plain_model: MarianShape) -> None:
    harness = Harness(plain_model, slots=1, max_queue=2)
    harness.submit([5], BEAM)
    harness.submit([5], BEAM)
    with pytest.raises(Overloaded, match="2 waiting"):
        harness.submit([5], BEAM)
    harness.step()  # one is running now
    harness.submit([5], BEAM)
    harness.engine.drain()
    with pytest.raises(ShuttingDown):
        harness.submit([5], BEAM)
    harness.finish()
    assert [type(answer) for answer in harness.answers.values()] == [Result] * 3


def test_a_step_that_fails_answers_everybody_and_the_engine_goes_on(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(plain_model)
    lost = harness.submit([5, 6], BEAM)
    harness.step()
    with monkeypatch.context() as patch:
        patch.setattr(harness.backend, "run", lambda inputs: 1 / 0)
        patch.setattr(harness.backend, "collect", lambda: 1 / 0, raising=False)  # of a backend that runs ahead
        harness.step()
    assert isinstance(harness.answers[lost], ComputeError)
    kept = harness.submit([5, 6], BEAM)
    harness.finish()
    assert isinstance(harness.answers[kept], Result)


def test_a_layout_that_fails_costs_nobody_who_comes_later(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(plain_model)
    expected = harness.answer([5, 6], BEAM)
    lost = harness.submit([5, 6], LONG)
    harness.step()
    with monkeypatch.context() as patch:
        patch.setattr(harness.backend._arenas["cache_value_0"], "resize", lambda sizes, slots: 1 / 0)
        while lost not in harness.answers:
            harness.step()
    assert isinstance(harness.answers[lost], ComputeError)
    assert_same(harness.answer([5, 6], BEAM), expected)


def poison_the_encoder(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every source that has a 13 in it."""
    encode = harness.backend.encode

    def picky(sources: list[list[int]]) -> object:
        if any(13 in source for source in sources):
            raise RuntimeError("poisoned")
        return encode(sources)

    monkeypatch.setattr(harness.backend, "encode", picky)


def test_a_source_that_breaks_the_encoder_fails_alone(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(plain_model)
    poison_the_encoder(harness, monkeypatch)
    good = [harness.submit([5, 6, n], BEAM) for n in range(20, 24)]
    bad = harness.submit([5, 6, 13], BEAM)
    harness.finish()
    assert isinstance(harness.answers[bad], ComputeError)
    assert all(isinstance(harness.answers[number], Result) for number in good)


def test_who_waits_is_encoded_with_who_comes(plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight to a run, each once, and those alone whose lengths are others; and somebody who leaves the queue takes what
    was encoded along."""
    harness = Harness(plain_model, slots=2)
    groups: list[list[int]] = []
    encode = harness.backend.encode

    def noted(sources: list[list[int]]) -> object:
        groups.append([len(source) for source in sources])
        return encode(sources)

    monkeypatch.setattr(harness.backend, "encode", noted)
    sources = [[5, 6, number] for number in range(20, 36)] + [[7] * 60]
    numbers = [harness.submit(source, BEAM) for source in sources]
    harness.step()
    assert groups == [[3] * 8]
    waiting = [request for request in harness.engine._queue.peek(99) if request.memory is not None]
    assert [request.id for request in waiting] == numbers[2:8]
    harness.engine.cancel(numbers[7])
    harness.finish()
    assert isinstance(harness.answers[numbers[7]], Cancelled)
    assert waiting[-1].memory is None
    assert groups == [[3] * 8, [3] * 8, [60]]
    alone = Harness(plain_model)
    for source, number in zip(sources, numbers, strict=True):
        if number != numbers[7]:
            assert_same(harness.result(number), alone.answer(source, BEAM))


def test_who_waits_and_breaks_the_encoder_fails_in_its_turn(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(plain_model, slots=2)
    poison_the_encoder(harness, monkeypatch)
    good = [harness.submit([5, 6, number], BEAM) for number in range(20, 23)]
    bad = harness.submit([5, 6, 13], BEAM)
    harness.step()
    assert harness.answers == {}
    good.append(harness.submit([5, 6, 30], BEAM))
    harness.finish()
    assert isinstance(harness.answers[bad], ComputeError)
    assert all(isinstance(harness.answers[number], Result) for number in good)


def groups_of(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many the encoder is run for, each time."""
    groups: list[int] = []
    encode = harness.backend.encode

    def noted(sources: list[list[int]]) -> object:
        groups.append(len(sources))
        return encode(sources)

    monkeypatch.setattr(harness.backend, "encode", noted)
    return groups


def test_who_breaks_the_encoder_is_encoded_along_once(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would be encoded one by one as long as it waits."""
    harness = Harness(plain_model, slots=1)
    poison_the_encoder(harness, monkeypatch)
    groups = groups_of(harness, monkeypatch)
    harness.submit([5, 6, 20], BEAM)
    bad = harness.submit([5, 6, 13], BEAM, priority=3)
    harness.submit([5, 6, 21], BEAM)
    harness.step()
    assert groups == [3, 1]
    for number in range(22, 25):
        harness.submit([5, 6, number], BEAM)
    harness.finish()
    assert groups == [3, 1, 4, 1]
    assert isinstance(harness.answers.pop(bad), ComputeError)
    assert all(isinstance(answer, Result) for answer in harness.answers.values())


def test_long_sources_are_not_encoded_along(plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """They gain nothing, and those who decode would wait for them."""
    harness = Harness(plain_model, slots=1)
    groups = groups_of(harness, monkeypatch)
    for number in range(20, 28):
        harness.submit([number] * 60, BEAM)
    harness.finish()
    assert groups == [4, 4]  # not eight at once


@pytest.mark.parametrize("full", ["encode", "launch"])
def test_who_waits_gives_its_memory_back_where_the_device_is_full(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    harness = Harness(plain_model, slots=2)
    queue, refused = harness.engine._queue, 0
    owner: Any = harness.backend if full == "encode" else harness.engine._pipeline
    works = getattr(owner, full)

    def limited(*what: Any) -> object:
        nonlocal refused
        if any(request.memory is not None for request in queue.peek()):
            refused += 1
            raise OutOfMemory("nothing left")
        return works(*what)

    sources = [[5, 6, number] for number in range(20, 26)]
    numbers = [harness.submit(source, BEAM) for source in sources]
    harness.step()
    assert [request.memory is not None for request in queue.peek()] == [True] * 4
    with monkeypatch.context() as patch:
        patch.setattr(owner, full, limited)
        sources.append([7] * 60)
        numbers.append(harness.submit(sources[-1], BEAM, priority=0))
        harness.finish()
    assert refused > 0
    alone = Harness(plain_model)
    for source, number in zip(sources, numbers, strict=True):
        assert_same(harness.result(number), alone.answer(source, BEAM))


def test_who_waits_gives_back_what_it_got_in_the_same_pass(
    plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two newcomers of different lengths are encoded apart, the first with some who wait."""
    harness = Harness(plain_model, slots=2)
    queue, refused, encode = harness.engine._queue, [], harness.backend.encode

    def limited(sources: list[list[int]]) -> object:
        if any(request.memory is not None for request in queue.peek()):
            refused.append(len(sources))
            raise OutOfMemory("nothing left")
        return encode(sources)

    monkeypatch.setattr(harness.backend, "encode", limited)
    sources = [[5, 6, 20], [7] * 60, *([5, 6, number] for number in range(21, 24))]
    numbers = [harness.submit(source, BEAM) for source in sources]
    harness.step()
    assert refused == [1]
    harness.finish()
    alone = Harness(plain_model)
    for source, number in zip(sources, numbers, strict=True):
        assert_same(harness.result(number), alone.answer(source, BEAM))


def test_options_that_forbid_everything_are_an_error(plain_model: MarianShape) -> None:
    harness = Harness(plain_model)
    everything = tuple(word for word in range(plain_model.manifest.vocabulary.target_size) if word != EOS)
    number = harness.submit([5], replace(BEAM, suppress_tokens=everything, min_length=30, max_length=31))
    harness.finish()
    assert isinstance(harness.answers[number], InvalidRequest)


def test_everybody_gets_an_answer_when_all_is_over(plain_model: MarianShape) -> None:
    harness = Harness(plain_model, slots=2)
    numbers = [harness.submit([5, n], LONG) for n in range(5, 10)]
    harness.step()
    deliver(harness.engine.fail_everything(ShuttingDown("over")))
    assert all(isinstance(harness.answers[number], ShuttingDown) for number in numbers)
    assert not harness.engine.busy


@pytest.mark.one_backend("the plans' cache lengths are others")
def test_copies_are_rare_and_counted(plain_model: MarianShape) -> None:
    """60 steps of 8 beams write 480 entries a slot; dead branches are cut, so the bucket stays far below."""
    harness = Harness(plain_model)
    for source in ([5, 6, 7], [8, 9], [10]):
        harness.submit(source, replace(LONG, beam_size=8))
    harness.finish()
    steps = [stats for stats in harness.stats if stats.beam_width]
    assert sum(stats.compactions for stats in steps) > 0
    assert max(stats.cache_length for stats in steps) <= 256
    copies = sum(stats.compactions + stats.relayouts + stats.moves for stats in steps)
    assert copies < len(steps)


@pytest.mark.one_backend("the plans' cache lengths are others")
def test_the_cache_gets_shorter_when_the_longest_has_left(plain_model: MarianShape) -> None:
    """Every step reads all of the bucket, so nobody goes on in the one that another has needed."""
    harness = Harness(plain_model)
    longest = harness.submit([5, 6, 7], replace(LONG, beam_size=8))
    while len(harness.stats) < 50:
        harness.step()
    harness.submit([8, 9], replace(LONG, beam_size=8))
    while longest not in harness.answers:
        harness.step()
    needed = harness.stats[-1].cache_length
    for _ in range(8):
        harness.step()
    assert harness.stats[-1].active == 1
    assert harness.stats[-1].cache_length < needed


def test_alignment_has_a_row_per_target_token(plain_model: MarianShape) -> None:
    answers = decode(
        make_engine(plain_model.folder, plain_model.manifest),
        [([5, 6, 7], replace(BEAM, return_alignment=True, prefix=(20, 21)))],
    )
    for hypothesis in results(answers)[0].hypotheses:
        assert hypothesis.alignment is not None
        assert len(hypothesis.alignment) == len(hypothesis.tokens)
        for row in hypothesis.alignment:
            assert len(row) == 3
            assert sum(row) == pytest.approx(1, abs=1e-4)


@pytest.mark.full
def test_memory_does_not_grow_with_steps(plain_model: MarianShape) -> None:
    engine = make_engine(plain_model.folder, plain_model.manifest)
    peaks = []
    for round_ in range(12):
        results(decode(engine, crowd(64, seed=round_ % 3)))
        gc.collect()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] <= peaks[3] * 1.02
