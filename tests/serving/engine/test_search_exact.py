"""Our search against Hugging Face `generate` on the same random weights: the same sequences with the same scores."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.manifest import DecodingDefaults
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis
from beamline.serving.text.model_card import card_of
from beamline.serving.text.options import decoding_options
from beamline.serving.text.token_bytes import ByteTokenizer
from tests.support.engines import decode, make_engine, results
from tests.support.hugging_face import Theirs, translations
from tests.support.marian_shape import BAD, EOS, MAX_LENGTH, PAD, VOCABULARY, MarianShape
from tests.support.ties import same_or_tie

BEAMS = (1, 2, 4, 5, 8)


@dataclass(frozen=True)
class Case:
    """One option, in our words and in Hugging Face's."""

    name: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()


def same(name: str, **options: Any) -> Case:
    return Case(name, options, options)


CASES = (
    Case("defaults"),
    same("length penalty 0", length_penalty=0.0),
    same("length penalty 2", length_penalty=2.0),
    same("length penalty -1", length_penalty=-1.0),
    same("early stopping", early_stopping=True),
    same("never stop early", early_stopping="never"),
    same("never, negative penalty", early_stopping="never", length_penalty=-0.5),
    same("min length", min_length=12),
    same("max length", max_length=9),
    same("tiny max length", max_length=3),
    same("no repeated bigrams", no_repeat_ngram_size=2),
    same("no repeated words", no_repeat_ngram_size=1, max_length=30),
    same("repetition penalty", repetition_penalty=1.7),
    same("repetition reward", repetition_penalty=0.8, max_length=20),
    Case(
        "bad words",
        {"bad_words": ((11,), (12, 13), (14, 15, 16))},
        {"bad_words_ids": [[11], [12, 13], [14, 15, 16]]},
    ),
    same("suppressed", suppress_tokens=(9, 10, 17, 33)),
    Case("forced end", {"forced_eos_id": 0, "max_length": 8}, {"forced_eos_token_id": 0, "max_length": 8}),
    Case("forced begin", {"forced_bos_id": 21}, {"forced_bos_token_id": 21}),
    Case("prefix", {"prefix": (20, 31)}, prefix=(20, 31)),
    Case(
        "prefix with rules",
        {"prefix": (20, 31, 20), "no_repeat_ngram_size": 2, "min_length": 9, "length_penalty": 0.6},
        {"no_repeat_ngram_size": 2, "min_length": 9, "length_penalty": 0.6},
        prefix=(20, 31, 20),
    ),
    same(
        "all at once",
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        min_length=5,
        max_length=40,
        early_stopping=True,
    ),
)


def sources(count: int, seed: int) -> list[list[int]]:
    """Lengths 1 to 60, and every count has a short and a long one."""
    chance = random.Random(seed)
    lengths = ([1, 60] + [chance.randint(1, 60) for _ in range(count)])[:count]
    return [[chance.randrange(2, PAD) for _ in range(length)] for length in lengths]


def compare(ours: Hypothesis, theirs: Theirs, where: str) -> None:
    assert same_or_tie(ours.tokens, ours.token_log_probs, theirs.tokens, theirs.log_probs), (
        f"{where}: {ours.tokens} is not {theirs.tokens}"
    )
    if list(ours.tokens) != theirs.tokens:
        return
    differences = [abs(a - b) for a, b in zip(ours.token_log_probs, theirs.log_probs, strict=True)]
    assert max(differences) < 1e-3, f"{where}: log-probabilities differ by {max(differences)}"
    if theirs.score is not None:
        assert ours.score == pytest.approx(theirs.score, abs=1e-3, rel=1e-5), where


def check(model: MarianShape, case: Case, beams: int, batch: int, seed: int) -> None:
    options = DecodingOptions(**{"beam_size": beams, "num_hypotheses": beams, "max_length": MAX_LENGTH, **case.ours})
    batch_sources = sources(batch, seed)
    engine = make_engine(model.folder, model.manifest)
    answers = results(decode(engine, [(source, options) for source in batch_sources]))
    expected = translations(model, batch_sources, case.theirs, beams, case.prefix)
    for source, answer, theirs in zip(batch_sources, answers, expected, strict=True):
        assert len(answer.hypotheses) == len(theirs)
        for rank, (mine, other) in enumerate(zip(answer.hypotheses, theirs, strict=True)):
            compare(mine, other, f"{case.name}, beam {beams}, source of {len(source)}, rank {rank}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_option(plain_model: MarianShape, case: Case) -> None:
    for beams in (1, 4):
        check(plain_model, case, beams, batch=3, seed=beams)


@pytest.mark.parametrize("kind", ["plain_model", "renormalising_model"])
def test_a_request_replaces_the_models_suppressed_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    """The model's are words of its likeliest answer: they come back where a request names others."""
    model: MarianShape = request.getfixturevalue(kind)
    (source,) = sources(1, seed=5)
    theirs = {"renormalize_logits": model.renormalise, "bad_words_ids": [[BAD]]} if model.renormalise else {}
    (usual,), *_ = translations(model, [source], theirs, 1)
    defaults = DecodingDefaults(
        beam_size=1, max_length=MAX_LENGTH, suppress_tokens=tuple(sorted({*usual.tokens} - {EOS}))
    )
    card = card_of(model.manifest.model_copy(update={"defaults": defaults}))
    engine = make_engine(model.folder, model.manifest)
    for asked, expected in (((), defaults.suppress_tokens), ((9, 10), (9, 10))):
        options = decoding_options(pb.DecodingOptions(suppress_tokens=asked), card, ByteTokenizer())
        (answer,) = results(decode(engine, [(tuple(source), options)]))
        ((other,),) = translations(model, [source], {**theirs, "suppress_tokens": list(expected)}, 1)
        compare(answer.hypotheses[0], other, f"suppressed {expected}")
        assert set(answer.hypotheses[0].tokens).isdisjoint(expected)
    assert not set(answer.hypotheses[0].tokens).isdisjoint(defaults.suppress_tokens)


@pytest.mark.parametrize("beams", BEAMS)
def test_every_beam_width(plain_model: MarianShape, renormalising_model: MarianShape, beams: int) -> None:
    check(plain_model, CASES[0], beams, batch=4, seed=10 + beams)
    check(renormalising_model, CASES[0], beams, batch=4, seed=20 + beams)


@pytest.mark.parametrize("name", ["bad words", "repetition penalty", "forced end", "prefix with rules", "min length"])
def test_renormalised_log_probabilities(renormalising_model: MarianShape, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    for beams in (1, 4):
        check(renormalising_model, case, beams, batch=3, seed=beams)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("beams", BEAMS)
def test_whole_grid(plain_model: MarianShape, renormalising_model: MarianShape, case: Case, beams: int) -> None:
    for batch in (1, 2, 7, 16):
        check(plain_model, case, beams, batch, seed=100 * beams + batch)
    check(renormalising_model, case, beams, batch=8, seed=beams)


def test_outputs_vary_and_end_by_themselves(plain_model: MarianShape) -> None:
    """The model must be worth comparing on: not one sentence for all, not always up to the limit."""
    options = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=MAX_LENGTH)
    engine = make_engine(plain_model.folder, plain_model.manifest)
    found = [r.hypotheses[0] for r in results(decode(engine, [(s, options) for s in sources(16, 3)]))]
    assert len({hypothesis.tokens for hypothesis in found}) >= 12
    assert sum(hypothesis.finish_reason is FinishReason.EOS for hypothesis in found) >= 10
    assert max(len(hypothesis.tokens) for hypothesis in found) > 12
    assert VOCABULARY > len({token for hypothesis in found for token in hypothesis.tokens}) > 10


def test_mixed_widths_in_one_batch(plain_model: MarianShape) -> None:
    widths = (1, 2, 4, 5, 8, 1, 4, 8)
    base = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=MAX_LENGTH)
    batch = [
        (source, replace(base, beam_size=width, num_hypotheses=width))
        for source, width in zip(sources(len(widths), 5), widths, strict=True)
    ]
    answers = results(decode(make_engine(plain_model.folder, plain_model.manifest), batch))
    for (source, options), answer in zip(batch, answers, strict=True):
        (theirs,) = translations(plain_model, [source], CASES[0].theirs, options.beam_size)
        for mine, other in zip(answer.hypotheses, theirs, strict=True):
            compare(mine, other, f"width {options.beam_size}")
