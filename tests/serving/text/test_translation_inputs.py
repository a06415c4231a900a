from __future__ import annotations

import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.engine.request import Request
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import card_of
from beamline.serving.text.token_bytes import ByteTokenizer
from beamline.serving.text.translation_inputs import PreparedInput, TranslationReader
from tests.serving.doubles import ids, small_manifest

LIMITS = TextLimits(max_inputs=3, max_text_bytes=1000, max_sequences=256)


def read(
    *inputs: pb.Input,
    languages: tuple[str, ...] = (),
    defaults: dict[str, object] | None = None,
    **fields: object,
) -> list[PreparedInput]:
    manifest = small_manifest(source_languages=languages, target_languages=languages)
    card = card_of(manifest.model_copy(update={"defaults": manifest.defaults.model_copy(update=defaults)}))
    reader = TranslationReader(card, ByteTokenizer(), ByteTokenizer(), LIMITS)
    return reader.read(pb.TranslateRequest(inputs=inputs, **fields))  # type: ignore[arg-type]


def text(value: str) -> pb.Input:
    return pb.Input(text=value)


def numbers(*values: int) -> pb.Input:
    return pb.Input(token_ids=pb.TokenIds(ids=values))


def max_length(request: Request) -> int:
    assert request.options is not None
    return request.options.max_length


def splitting(**options: object) -> pb.DecodingOptions:
    return pb.DecodingOptions(split_sentences=True, **options)  # type: ignore[arg-type]


def test_a_text_becomes_one_sequence() -> None:
    (prepared,) = read(text("Hi. You."))
    assert [request.source for request in prepared.requests] == [ids("Hi. You.")]
    assert prepared.layout is None


def test_token_ids_are_taken_as_they_are() -> None:
    (prepared,) = read(numbers(5, 6, 258))
    assert prepared.requests[0].source == (5, 6, 258)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([], "give 1 to 3"),
        ([text("a")] * 4, "has 4 inputs; at most 3"),
        ([pb.Input()], "inputs[0] is empty: give text or token_ids"),
        ([text("a"), text("")], "inputs[1].text is empty"),
        ([text(" \n")], "inputs[0].text is empty"),
        (
            [text("a" * 64)],
            "has 65 tokens; this model reads at most 64; send shorter texts, or have it split (split_sentences)",
        ),
        ([text("a" * 1001)], "longer than 1000 bytes"),
        ([text("ü" * 501)], "longer than 1000 bytes"),
        ([numbers()], "has no ids"),
        ([numbers(1, 259)], "contains 259; this model's source vocabulary has ids 0 to 258"),
        ([numbers(*[5] * 65)], "has 65 tokens; this model reads at most 64"),
        (
            [pb.Input(features=pb.Features(rows=1, columns=1, values=[1]))],
            "reads text: give text or token_ids",
        ),
    ],
)
def test_inputs_that_are_refused(inputs: list[pb.Input], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(*inputs)
    assert sentence in str(caught.value)


def test_too_many_inputs_are_refused_before_any_is_looked_at() -> None:
    with pytest.raises(InvalidRequest, match="has 4 inputs; at most 3"):
        read(*[text("a")] * 4, source_language="de")


def test_a_large_prefix_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(InvalidRequest, match=r"options.target_prefix is longer than 1000 bytes"):
        read(text("a"), options=pb.DecodingOptions(target_prefix="a" * 1001))


def test_languages() -> None:
    assert read(text("a"), languages=("de", "en"), source_language="de")
    with pytest.raises(InvalidRequest, match=r"source_language is 'fr'; .* knows de, en"):
        read(text("a"), languages=("de", "en"), source_language="fr")
    with pytest.raises(InvalidRequest, match="no choice of languages: leave it empty"):
        read(text("a"), target_language="de")


def test_split_text_becomes_a_sequence_per_sentence_and_only_the_first_has_the_prefix() -> None:
    (prepared,) = read(text("One is here. Two."), options=splitting(target_prefix="x"))
    assert [request.source for request in prepared.requests] == [ids("One is here."), ids("Two.")]
    assert [len(request.prefix) for request in prepared.requests] == [1, 0]
    assert prepared.layout is not None


def test_any_long_text_can_be_split() -> None:
    (prepared,) = read(text("word " * 100 + "x" * 300), options=splitting())
    assert all(len(request.source) <= 64 for request in prepared.requests)


def test_a_text_of_too_many_parts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="split into 300 parts; at most 256 are allowed"):
        read(text("a\n" * 300), options=splitting())


def test_what_a_split_text_can_not_have() -> None:
    with pytest.raises(InvalidRequest, match=r"num_hypotheses is 2, but inputs\[0\].text was split into 2 parts"):
        read(text("One is. Two."), options=splitting(num_hypotheses=2))
    with pytest.raises(InvalidRequest, match=r"return_alignment needs a text of one part"):
        read(text("One is. Two."), options=splitting(return_alignment=True))
    assert read(text("One."), options=splitting(num_hypotheses=2, return_alignment=True))


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, [8, 15]),  # 1.5 times 3 and 8 tokens, and 3 more
        ({"min_length": 20}, [20, 20]),
        ({"target_prefix": "ab"}, [10, 17]),
        ({"max_length": 70}, [70, 70]),  # as asked, whatever the source
    ],
)
def test_a_default_bound_grows_with_the_source(options: dict[str, object], longest: list[int]) -> None:
    defaults: dict[str, object] = {"max_length_factor": 1.5, "max_length_extra": 3}
    texts = [text("ab"), text("abcdefg")]
    found = read(*texts, defaults=defaults, options=pb.DecodingOptions(**options))  # type: ignore[arg-type]
    assert [max_length(item.requests[0]) for item in found] == longest


def test_the_bound_is_of_each_sentence_and_never_above_max_length() -> None:
    defaults: dict[str, object] = {"max_length_factor": 4.0}
    (prepared,) = read(text("Hi. It is a longer sentence."), defaults=defaults, options=splitting())
    assert [max_length(request) for request in prepared.requests] == [4 * 4, 72]
