"""Language models of the newer families, exported and served: the very tokens of Hugging Face `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from beamline.serving.engine.options import DecodingOptions
from tests.serving.engine.test_search_exact import compare
from tests.support.engines import decode, make_engine, results
from tests.support.few_bits import write_int8
from tests.support.hugging_face import texts
from tests.support.language_families import GEMMA2, POSITIONS, SHAPES
from tests.support.language_models import VOCABULARY, ConvertedLanguageModel, LanguageShape, convert_language_model

WIDEST = 8
_converted: dict[str, ConvertedLanguageModel] = {}


@pytest.fixture
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConvertedLanguageModel:
    """The shape that a test is parametrized with, once per process."""
    shape = cast(LanguageShape, request.param)
    if shape.name not in _converted:
        _converted[shape.name] = convert_language_model(shape, tmp_path_factory.mktemp(shape.name), grid="quick")
    return _converted[shape.name]


def shapes(*chosen: LanguageShape) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("converted", chosen, indirect=True, ids=lambda shape: shape.name)


def check(model: ConvertedLanguageModel, beams: int, lengths: tuple[int, ...], new: int, stagger: int = 0) -> None:
    """A prompt of each length, all in one batch, against `generate` one by one. Of more than 200 tokens, all are
    written, whether or not the model would end sooner."""
    chance = random.Random(beams)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    long = new > 200
    options = DecodingOptions(beams, beams, max_length=new + 1, min_length=new + 1 if long else 0)
    given: dict[str, Any] = {"max_new_tokens": new, **({"min_new_tokens": new} if long else {})}
    engine = make_engine(model.folder, model.manifest, cache_entries=WIDEST * POSITIONS)
    answers = results(decode(engine, [(prompt, options) for prompt in prompts], stagger))
    for prompt, answer, theirs in zip(prompts, answers, texts(model, prompts, given, beams), strict=True):
        assert len(answer.hypotheses) == len(theirs)
        for rank, (mine, other) in enumerate(zip(answer.hypotheses, theirs, strict=True)):
            compare(mine, other, f"beam {beams}, prompt of {len(prompt)}, {new} tokens, rank {rank}")


@shapes(GEMMA2)
def test_the_tokens_of_generate(converted: ConvertedLanguageModel) -> None:
    """Windows, caps, and norms on either side of a sublayer: the farthest from Llama."""
    for beams in (1, 4):
        check(converted, beams, (1, 17, 60), new=20, stagger=3)


@pytest.mark.full
@pytest.mark.timeout(1800)
@shapes(*SHAPES)
def test_whole_grid(converted: ConvertedLanguageModel) -> None:
    """All widths, alone and in a crowd of other lengths that joins by and by; texts far longer than the windows."""
    for beams in (1, 2, 4, WIDEST):
        check(converted, beams, (1, 2, 30, 77, 130), new=40, stagger=2)
        check(converted, beams, (21,), new=40)
        check(converted, beams, (12, 90), new=210)


@pytest.mark.full
@pytest.mark.timeout(900)
@shapes(*SHAPES)
def test_every_shape_in_8_bits(converted: ConvertedLanguageModel, tmp_path: Path) -> None:
    """Random weights are the worst case for rounding; still, most words of real text stay."""
    agreement = write_int8(converted.folder, tmp_path)
    assert agreement.lines >= 20
    assert agreement.words >= 100
    assert agreement.share >= 0.8
