"""Decoding with a shortlist: the same search over fewer words, and still nobody notices who else is there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Result
from beamline.serving.engine.request import Request
from tests.serving.engine.test_engine import BEAM, GREEDY, LONG, assert_same, crowd
from tests.serving.engine.test_few_bits import lost_only_one
from tests.serving.engine.test_search_exact import CASES, Case, compare, sources
from tests.support.engines import decode, make_engine, results, step
from tests.support.few_bits import in_few_bits
from tests.support.hugging_face import translations
from tests.support.marian_shape import EOS, MAX_LENGTH, VOCABULARY, MarianShape
from tests.support.shortlists import ALL, EVERYWHERE, FEW, lexicon, shortlisted_engine, with_lexicon

PREFIX = (20, 21)


@pytest.fixture(scope="module")
def int8_model(plain_model: MarianShape, tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    return in_few_bits(plain_model, tmp_path_factory.mktemp("int8"), "int8")


@pytest.fixture(scope="module")
def restricted(plain_model: MarianShape, tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    return with_lexicon(plain_model, tmp_path_factory.mktemp("few"), lexicon(EVERYWHERE, FEW))


@pytest.fixture(scope="module")
def restricted_int8(int8_model: MarianShape, tmp_path_factory: pytest.TempPathFactory) -> MarianShape:
    return with_lexicon(int8_model, tmp_path_factory.mktemp("few"), lexicon(EVERYWHERE, FEW))


def words_for(model: MarianShape, source: list[int], options: DecodingOptions) -> set[int]:
    """What a request may say, by the table that the model was given."""
    named = {word for word, bias in options.logit_bias if bias > 0}
    if options.forced_bos_id is not None:
        named.add(options.forced_bos_id)
    lists = (FEW[word] for word in source)
    return {*EVERYWHERE, *model.manifest.vocabulary.eos_ids, *options.prefix, *named}.union(*lists)


def same(found: Result, expected: Result, int8: bool = False) -> None:
    if not (int8 and lost_only_one(found, expected)):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["plain_model", "renormalising_model", "int8_model"])
def test_a_list_of_all_words_changes_nothing(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model: MarianShape = request.getfixturevalue(kind)
    requests = crowd(8, seed=1)
    expected = results(decode(make_engine(model.folder, model.manifest, slots=4), requests, stagger=1))
    engine, _ = shortlisted_engine(with_lexicon(model, tmp_path, ALL), slots=4)
    for found, other in zip(results(decode(engine, requests, stagger=1)), expected, strict=True):
        same(found, other, int8=kind == "int8_model")


def restricted_original(model: MarianShape, words: set[int]) -> MarianShape:
    """Hugging Face's model, for which the other words have no probability at all: it is shared out among these."""
    original = copy.deepcopy(model.original)
    with torch.no_grad():
        original.final_logits_bias[0, [word for word in range(VOCABULARY) if word not in words]] = -torch.inf
    return replace(model, original=original)


def check_against_hugging_face(model: MarianShape, folder: Path, case: Case, beams: int, count: int) -> None:
    options = DecodingOptions(**{"beam_size": beams, "num_hypotheses": beams, "max_length": MAX_LENGTH, **case.ours})
    listed = with_lexicon(model, folder, lexicon(EVERYWHERE, FEW))
    texts = [text for text in sources(2 * count, seed=beams) if len(words_for(model, text, options)) > 3 * beams]
    texts = texts[:count]
    assert texts
    engine, _ = shortlisted_engine(listed)
    for text, answer in zip(texts, results(decode(engine, [(text, options) for text in texts])), strict=True):
        words = words_for(model, text, options)
        assert len(words) < VOCABULARY
        (theirs,) = translations(restricted_original(model, words), [text], case.theirs, beams, case.prefix)
        for ours, other in zip(answer.hypotheses, theirs, strict=True):
            compare(ours, other, f"{case.name}, {beams} beams, {text}")


@pytest.mark.parametrize(
    ("name", "beams"),
    [("defaults", 4), ("no repeated bigrams", 1), ("repetition penalty", 1), ("prefix with rules", 2)],
)
def test_it_is_the_search_over_the_listed_words(
    renormalising_model: MarianShape, tmp_path: Path, name: str, beams: int
) -> None:
    """Normalised over them, as Hugging Face does where the others are impossible."""
    case = next(case for case in CASES if case.name == name)
    check_against_hugging_face(renormalising_model, tmp_path, case, beams, count=1)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("kind", ["plain_model", "renormalising_model"])
def test_it_is_the_search_over_the_listed_words_at_length(
    kind: str, tmp_path: Path, case: Case, beams: int, request: pytest.FixtureRequest
) -> None:
    check_against_hugging_face(request.getfixturevalue(kind), tmp_path, case, beams, count=3)


@pytest.mark.parametrize("kind", ["restricted", "restricted_int8"])
@pytest.mark.parametrize("stagger", [0, 1])
def test_an_answer_does_not_depend_on_its_neighbours(kind: str, stagger: int, request: pytest.FixtureRequest) -> None:
    """Alone, among others whose lists are computed too, and joining and leaving while those change."""
    model: MarianShape = request.getfixturevalue(kind)
    sampling = replace(GREEDY, beam_size=3, num_hypotheses=3, temperature=0.9, top_k=9, seed=7)
    requests = [*crowd(8, seed=5), ([5, 6, 7], sampling), ([8, 9], replace(sampling, top_k=0, top_p=0.8))]
    alone_engine, _ = shortlisted_engine(model)
    alone = [results(decode(alone_engine, [each]))[0] for each in requests]
    engine, shortlist = shortlisted_engine(model, slots=4)
    for found, expected in zip(results(decode(engine, requests, stagger)), alone, strict=True):
        same(found, expected, int8=kind == "restricted_int8")
    assert shortlist.gathered > 1
    for (source, options), answer in zip(requests, alone, strict=True):
        said = {word for hypothesis in answer.hypotheses for word in hypothesis.tokens}
        assert said <= words_for(model, list(source), options)


def test_rows_are_gathered_when_the_batch_changes_and_not_at_each_step(restricted: MarianShape) -> None:
    engine, shortlist = shortlisted_engine(restricted)
    many = list(range(2, 40))
    answers: list[object] = []
    before = shortlist.gathered
    for source, options in [(many, replace(LONG, max_length=12, min_length=11)), (many[:3], LONG)]:
        engine.submit(Request(tuple(source), options, answers.append))
    while not answers:
        step(engine)
    assert shortlist.gathered == before + 1  # for both, however many steps
    while engine.busy:
        step(engine)
    assert shortlist.gathered == before + 2  # the one with many words has gone
    results(decode(engine, [(many[:2], BEAM)]))
    assert shortlist.gathered == before + 2  # its words were there already


def test_words_that_a_request_names_are_listed(restricted: MarianShape) -> None:
    engine, _ = shortlisted_engine(restricted)
    source = [5]
    outside = next(word for word in range(4, VOCABULARY) if word not in words_for(restricted, source, BEAM))
    options = replace(GREEDY, max_length=6)
    biased = replace(options, logit_bias=((outside, 50.0),))
    suppressed = replace(options, suppress_tokens=(outside, EOS))  # a rule for a word that is not listed is no harm
    plain, found, without = results(decode(engine, [(source, options), (source, biased), (source, suppressed)]))
    assert outside not in plain.hypotheses[0].tokens
    assert set(found.hypotheses[0].tokens) == {outside}
    assert EOS not in without.hypotheses[0].tokens


def test_alternatives_are_listed_words(restricted: MarianShape) -> None:
    engine, _ = shortlisted_engine(restricted)
    source = [5, 9, 11]
    (answer,) = results(decode(engine, [(source, replace(GREEDY, top_log_probs=5))]))
    for token, alternatives in zip(answer.hypotheses[0].tokens, answer.hypotheses[0].alternatives, strict=True):
        assert alternatives[0][0] == token
        assert {word for word, _ in alternatives} <= words_for(restricted, source, GREEDY)
