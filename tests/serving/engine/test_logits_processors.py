"""Logits processors that follow the tree, beside the same rules made anew from whole sequences at every step."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.serving.backends.fake import FakeBackend, fake_manifest
from beamline.serving.engine.capacity import Plan
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.request import Request
from beamline.serving.engine.search.beam_search import BeamSearch, StepView
from beamline.serving.engine.search.edits import BeamEdits, EditArrays, EditList
from beamline.serving.engine.search.history import Beginning
from beamline.serving.engine.search.logits_processors import LogitsProcessors
from beamline.serving.engine.search.sampler import Sampler

WORDS = 7  # few, so that much is repeated
EOS = 1
FORBIDDEN = float("-inf")
Edit = tuple[float, float]

word = st.integers(2, WORDS - 1)


def plain_edits(options: DecodingOptions, before: Sequence[int], sequence: Sequence[int]) -> dict[int, Edit]:
    """What is edited behind a whole sequence, as plainly as possible; `before` is a prompt without its last token."""
    whole, answer = [*before, *sequence], sequence[1 + len(options.prefix) :]
    edits: dict[int, Edit] = {}
    if options.repetition_penalty != 1.0:
        edits = dict.fromkeys(whole, (options.repetition_penalty, 0.0))
    if options.presence_penalty or options.frequency_penalty:
        for token, count in Counter(answer).items():
            scale = edits.get(token, (1.0, 0.0))[0]
            edits[token] = (scale, -options.presence_penalty - count * options.frequency_penalty)
    biases = {token: FORBIDDEN if bias <= -100 else bias for token, bias in options.logit_bias}
    biases |= dict.fromkeys(options.suppress_tokens, FORBIDDEN)
    biases |= {phrase[0]: FORBIDDEN for phrase in options.bad_words if len(phrase) == 1 and phrase[0] != EOS}
    for token, bias in biases.items():
        scale, add = edits.get(token, (1.0, 0.0))
        edits[token] = (scale, add + bias)
    size = options.no_repeat_ngram_size
    if size and len(whole) + 1 >= size:
        grams = [tuple(whole[start : start + size]) for start in range(len(whole) - size + 1)]
        last = tuple(whole[len(whole) - size + 1 :])
        edits |= {gram[-1]: (1.0, FORBIDDEN) for gram in grams if gram[:-1] == last}
    for phrase in options.bad_words:
        if len(phrase) > 1 and tuple(whole[-len(phrase) + 1 :]) == phrase[:-1]:
            edits[phrase[-1]] = (1.0, FORBIDDEN)
    if len(sequence) < options.min_length:
        edits[EOS] = (1.0, FORBIDDEN)
    return edits


@st.composite
def rules(draw: st.DrawFn) -> DecodingOptions:
    prefix = tuple(draw(st.lists(word, max_size=3)))
    return DecodingOptions(
        beam_size=draw(st.integers(1, 4)),
        num_hypotheses=1,
        max_length=len(prefix) + 60,
        min_length=draw(st.sampled_from([0, 4])),
        prefix=prefix,
        no_repeat_ngram_size=draw(st.sampled_from([0, 1, 2, 3, 4, 20])),  # the longest is known by its digest
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(word, min_size=1, max_size=4), max_size=3)))),
        suppress_tokens=tuple(draw(st.lists(word, max_size=2, unique=True))),
        logit_bias=tuple(draw(st.dictionaries(word, st.sampled_from([-100.0, -2.0, 3.0]), max_size=2)).items()),
        temperature=draw(st.sampled_from([0.0, 1.0])),
    )


def expected_rows(options: DecodingOptions, before: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[object]:
    """In float32, and without edits that change nothing."""
    found = [plain_edits(options, before, sequence) for sequence in sequences]
    return [{token: tuple(map(np.float32, edit)) for token, edit in row.items() if edit != (1.0, 0.0)} for row in found]


def rows_of(edits: Sequence[BeamEdits], width: int, beams: int) -> list[object]:
    """Out of a step's arrays: no token may have two edits, and a beam that only pads the batch has none."""
    index, scale, add = EditArrays(WORDS).write([edits], beams)
    rows: list[object] = []
    for beam in range(beams):
        row: dict[int, tuple[float, float]] = {}
        for token, edit in zip(index[0, beam].tolist(), zip(scale[0, beam], add[0, beam], strict=True), strict=True):
            assert row.setdefault(token, edit) == edit
        row = {token: edit for token, edit in row.items() if edit != (1.0, 0.0)}
        assert beam < width or not row
        rows.append(row)
    return rows[:width]


@settings(max_examples=250)
@given(rules(), st.lists(word, min_size=1, max_size=30), st.data())
def test_the_same_as_from_whole_sequences(options: DecodingOptions, prompt: list[int], data: st.DataObject) -> None:
    before, start, width = prompt[:-1], prompt[-1], options.beam_size
    search = (Sampler if options.samples else BeamSearch)(options, start, (EOS,), len(before))
    beginning = Beginning((*prompt, *options.prefix), options.no_repeat_ngram_size)
    processors = LogitsProcessors(options, (EOS,), beginning)
    sequences = [[start] for _ in range(width)]
    for _ in range(data.draw(st.integers(1, len(options.prefix) + 25))):
        forced = search.forced_token()
        edits = processors.edits(search)
        if forced is None:
            assert rows_of(edits, width, width + 1) == expected_rows(options, before, sequences)
        parents = list(range(width))
        if forced is None and not options.samples:
            parents = data.draw(st.lists(st.integers(0, width - 1), min_size=width, max_size=width))
        tokens = data.draw(st.lists(word, min_size=width, max_size=width)) if forced is None else [forced] * width
        sequences = [[*sequences[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        scores = [-1.0 - beam for beam in range(width)]
        search.advance(StepView(tokens, parents, scores, scores, tokens, parents))


def test_steps_may_be_followed_late() -> None:
    """Nobody asks while another request's failure is dealt with, say: what was missed is made up for."""
    options = DecodingOptions(beam_size=2, num_hypotheses=1, max_length=20, no_repeat_ngram_size=2)
    search = BeamSearch(options, 3, (EOS,))
    processors = LogitsProcessors(options, (EOS,), Beginning((3,), 2))
    for tokens, parents in (([4, 5], [0, 0]), ([3, 3], [0, 1]), ([4, 6], [1, 0])):
        search.advance(StepView(tokens, parents, [-1.0, -2.0], [-1.0, -2.0], tokens, parents))
    # 3 5 3 4 and 3 4 3 6
    assert rows_of(processors.edits(search), 2, 2) == expected_rows(options, (), [[3, 5, 3, 4], [3, 4, 3, 6]])


def test_the_prompt_is_looked_at_once() -> None:
    """However long it is: a step's work on it is copying what lies there."""

    class Watched(tuple[int, ...]):
        looked = 0

        def __iter__(self) -> Iterator[int]:
            Watched.looked += 1
            return super().__iter__()

    options = DecodingOptions(
        beam_size=4, num_hypotheses=1, max_length=99, no_repeat_ngram_size=3, repetition_penalty=1.2
    )
    beginning = Beginning(range(5000), 3)
    beginning.tokens = Watched(beginning.tokens)
    search = BeamSearch(options, 4999, (EOS,), 4999)
    processors = LogitsProcessors(options, (EOS,), beginning)
    before = Watched.looked
    assert before > 0
    for _ in range(5):
        row = processors.edits(search)[0]
        assert row.edits.size >= 5000
        search.advance(StepView([7] * 4, [0, 0, 1, 2], [-1.0] * 4, [-1.0] * 8, [7] * 8, [0] * 8))
    assert Watched.looked == before


def test_memory_that_is_used_again_keeps_nothing() -> None:
    arrays = EditArrays(100)
    arrays.write([[BeamEdits(EditList(range(4), 2.0), (1,))] * 2, []], 2)
    index, scale, add = arrays.write([[], [BeamEdits(EditList(range(10), 3.0))]], 2)
    nothing = [(0, 0), (0, 1), (1, 1)]
    assert all((index[place] == 0).all() and (scale[place] == 1).all() and (add[place] == 0).all() for place in nothing)
    assert sorted(set(index[1, 0].tolist())) == list(range(10))
    assert (scale[1, 0] == 3).all()


def test_long_lists_are_padded_to_few_sizes_and_to_the_vocabulary_at_most() -> None:
    arrays = EditArrays(6000)
    sizes = {
        arrays.write([[BeamEdits(EditList(range(count)))]], 1)[0].shape[2]: count
        for count in (0, 1, 5, 1000, 1025, 4000, 4097, 5000, 6000)
    }
    assert list(sizes) == [0, 4, 16, 1024, 2048, 4096, 6000]


def gaps_of_neighbours(hostile: DecodingOptions | None) -> float:
    """The median time between two steps of 2 ms in which four streams take part, and four long prompts with rules."""
    manifest = fake_manifest("fake-lm", "generate")
    vocabulary = manifest.vocabulary.model_copy(update={"source_size": 50_000, "target_size": 50_000})
    manifest = manifest.model_copy(update={"vocabulary": vocabulary})
    engine = Engine(manifest, FakeBackend(manifest, 0.002), Plan.of(manifest, 8), max_queue=100)
    chance = random.Random(1)

    def submit(options: DecodingOptions) -> None:
        engine.submit(Request(tuple(chance.randrange(3, 50_000) for _ in range(4000)), options, streams=True))

    for _ in range(4):
        submit(DecodingOptions(beam_size=1, num_hypotheses=1, max_length=2000))
        if hostile is not None:
            submit(hostile)
    while len(engine._scheduler.active) < (4 if hostile is None else 8):
        engine.step()
    times = []
    for _ in range(60):
        engine.step()
        times.append(time.perf_counter())
    return median(later - earlier for earlier, later in pairwise(times))


@pytest.mark.full
def test_long_prompts_with_rules_cost_their_neighbours_little() -> None:
    """Promised is less than twice a quiet engine's gap; it was 33 times."""
    rules = DecodingOptions(
        beam_size=16,
        num_hypotheses=1,
        max_length=250,
        no_repeat_ngram_size=3,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        temperature=1.0,
    )
    assert gaps_of_neighbours(rules) < 10 * 2 * gaps_of_neighbours(None)
