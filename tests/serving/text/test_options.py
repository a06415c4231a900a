from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.manifest import DecodingDefaults
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import card_of
from beamline.serving.text.options import decoding_options, generation_options
from beamline.serving.text.token_bytes import EOS_ID, ByteTokenizer
from tests.serving.doubles import small_manifest


def options(defaults: dict[str, object] | None = None, **asked: Any) -> DecodingOptions:
    manifest = small_manifest()
    if defaults is not None:
        values = {"beam_size": 4, "max_length": 72, **defaults}
        manifest = manifest.model_copy(update={"defaults": DecodingDefaults.model_validate(values)})
    return decoding_options(pb.DecodingOptions(**asked), card_of(manifest), ByteTokenizer())


def generated(defaults: Mapping[str, object], prompt: int, **asked: Any) -> DecodingOptions:
    manifest = small_manifest()
    values = DecodingDefaults.model_validate({"beam_size": 1, "max_length": 72, **defaults})
    card = card_of(manifest.model_copy(update={"defaults": values}))
    return generation_options(pb.GenerationOptions(**asked), card, prompt)


def test_a_language_models_lengths_count_its_prompt() -> None:
    """Ours count from the prompt's last token."""
    found = generated({"max_length": 40, "min_length": 25}, prompt=20)
    assert (found.max_length, found.min_length) == (21, 6)
    assert generated({"max_length": 40, "min_new_tokens": 7, "min_length": 25}, prompt=20).min_length == 8
    assert generated({"max_length": 40, "max_new_tokens": 9}, prompt=20).max_length == 10
    assert generated({"max_length": 40, "min_length": 39}, prompt=20, max_tokens=3).min_length == 4
    assert generated({"max_length": 40}, prompt=45, max_tokens=3).max_length == 4
    with pytest.raises(InvalidRequest, match=r"the prompt has 40 tokens, .* max_length of 40, .*: set max_tokens"):
        generated({"max_length": 40}, prompt=40)


def test_a_language_models_answers_and_end() -> None:
    beams = {"beam_size": 4, "num_hypotheses": 3, "forced_eos_id": EOS_ID}
    found = generated(beams, prompt=5)
    assert (found.beam_size, found.num_hypotheses, found.forced_eos_id) == (4, 3, EOS_ID)
    assert generated(beams, prompt=5, beam_size=2).num_hypotheses == 2
    assert generated(beams, prompt=5, n=1).num_hypotheses == 1
    assert generated(beams, prompt=5, temperature=0).num_hypotheses == 1  # greedy
    drawn = generated({"temperature": 0.7, "num_hypotheses": 3}, prompt=5)
    assert (drawn.beam_size, drawn.num_hypotheses, drawn.forced_eos_id) == (3, 3, None)


def test_translations_are_drawn_where_a_temperature_is_asked_for() -> None:
    found = options({"top_k": 5, "num_hypotheses": 2}, temperature=0.7, num_hypotheses=3, top_p=0.9, min_p=0.1, seed=8)
    assert (found.beam_size, found.num_hypotheses, found.samples) == (3, 3, True)
    assert (found.top_k, found.seed) == (5, 8)
    assert (found.temperature, found.top_p, found.min_p) == pytest.approx((0.7, 0.9, 0.1))
    assert options({}, temperature=1).num_hypotheses == 1  # whatever beams the model's default has
    assert options({}, temperature=1).seed != options({}, temperature=1).seed
    assert (options({}).beam_size, options({}).samples) == (4, False)
    assert options({}, temperature=0).beam_size == 4


def test_a_model_that_samples_by_itself_can_be_asked_for_beams() -> None:
    defaults: dict[str, object] = {"temperature": 0.8, "num_hypotheses": 3}
    assert (options(defaults).beam_size, options(defaults).samples) == (3, True)
    assert (options(defaults, beam_size=2).beam_size, options(defaults, beam_size=2).samples) == (2, False)
    assert options(defaults, temperature=0).beam_size == 1


def test_nothing_asked_gives_the_defaults() -> None:
    defaults = {
        "beam_size": 3,
        "num_hypotheses": 2,
        "length_penalty": 0.6,
        "early_stopping": "never",
        "min_length": 5,
        "max_length": 40,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.2,
        "bad_words": ((7, 8),),
        "suppress_tokens": (9,),
        "forced_bos_id": 10,
        "forced_eos_id": EOS_ID,
    }
    assert options(defaults) == DecodingOptions(**defaults)  # type: ignore[arg-type]


def test_what_is_asked_wins_over_the_defaults() -> None:
    given = options(
        {"num_hypotheses": 1, "suppress_tokens": (9,), "early_stopping": True},
        beam_size=8,
        num_hypotheses=8,
        length_penalty=0.0,
        early_stopping=pb.EARLY_STOPPING_FALSE,
        min_length=3,
        max_length=80,
        no_repeat_ngram_size=2,
        repetition_penalty=1.5,
        target_prefix="ab",
        suppress_tokens=[5, 4, 5],
        time_limit_ms=1500,
        return_alignment=True,
    )
    assert given == DecodingOptions(
        beam_size=8,
        num_hypotheses=8,
        max_length=80,
        min_length=3,
        length_penalty=0.0,
        early_stopping=False,
        no_repeat_ngram_size=2,
        repetition_penalty=1.5,
        suppress_tokens=(4, 5),
        prefix=tuple(ByteTokenizer().encode_prefix("ab")),
        time_limit=1.5,
        return_alignment=True,
    )


def test_only_defaults_give_way() -> None:
    given = options({"num_hypotheses": 4, "min_length": 30}, beam_size=1, max_length=20)
    assert (given.num_hypotheses, given.min_length) == (1, 20)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"beam_size": 0}, "beam_size is 0; this model allows 1 to 8"),
        ({"beam_size": 1000}, "beam_size is 1000; this model allows 1 to 8"),
        ({"num_hypotheses": 0}, "num_hypotheses is 0; beam_size 4 allows 1 to 4"),
        ({"num_hypotheses": 5}, "num_hypotheses is 5; beam_size 4 allows 1 to 4"),
        ({"beam_size": 1, "num_hypotheses": 2}, "num_hypotheses is 2; beam_size 1 allows 1 to 1"),
        ({"max_length": 81}, "max_length is 81; this model allows 2 to 80"),
        ({"max_length": 1}, "max_length is 1; this model allows 2 to 80"),
        ({"target_prefix": "abc", "max_length": 4}, "max_length must be at least 5"),
        ({"target_prefix": "a" * 100}, "this model allows up to 80"),
        ({"min_length": 73}, "min_length is 73; it must be 0 to max_length, which is 72"),
        ({"min_length": 11, "max_length": 10}, "0 to max_length, which is 10"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; it must be a finite number from 0.01 to 100"),
        ({"repetition_penalty": -1.0}, "from 0.01 to 100"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"length_penalty": math.nan}, "length_penalty is nan; it must be a finite number from -10 to 10"),
        ({"length_penalty": 1e30}, "from -10 to 10"),
        ({"no_repeat_ngram_size": 81}, "no_repeat_ngram_size is 81; this model allows 0 to 80"),
        (
            {"suppress_tokens": [5, 259]},
            "suppress_tokens contains 259; this model's target vocabulary has ids 0 to 258",
        ),
        ({"suppress_tokens": [EOS_ID]}, "every end token (2)"),
        ({"time_limit_ms": 0}, "at least 1"),
        ({"early_stopping": 9}, "early_stopping is 9; it must be 1 (false), 2 (true) or 3 (never)"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(**asked)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"temperature": 1, "beam_size": 2}, "a beam search does not sample: set temperature to 0, or beam_size to 1"),
        ({"temperature": 0.001}, "it must be 0 (no sampling) or from 0.01 to 100"),
        ({"temperature": math.nan}, "temperature is nan; it must be a finite number"),
        ({"temperature": 1, "beam_size": 0}, "beam_size is 0; this model allows 1 to 1"),
        ({"temperature": 1, "num_hypotheses": 0}, "num_hypotheses is 0; this model allows 1 to"),
        ({"temperature": 1, "top_k": 1025}, "top_k is 1025; this model allows 0 to 1024"),
        ({"temperature": 1, "top_p": 0}, "top_p is 0; it must be above 0, up to 1 (off)"),
        ({"temperature": 1, "min_p": 1.5}, "min_p is 1.5; it must be a finite number from 0 to 1"),
    ],
    ids=str,
)
def test_wrong_ways_to_sample_are_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options({}, **asked)
    assert sentence in str(caught.value)


def test_the_bounds_themselves_are_allowed() -> None:
    given = options(repetition_penalty=0.01, length_penalty=-10.0, no_repeat_ngram_size=80, min_length=72)
    assert given.repetition_penalty == pytest.approx(0.01)
    assert options(target_prefix="abc", max_length=5).max_length == 5


def test_a_prefix_with_an_end_token_is_refused() -> None:
    class EndsEarly(ByteTokenizer):
        def encode_prefix(self, text: str) -> list[int]:
            return [5, EOS_ID, 6]

    with pytest.raises(InvalidRequest, match="end token"):
        decoding_options(pb.DecodingOptions(target_prefix="x"), card_of(small_manifest()), EndsEarly())
