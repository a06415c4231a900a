"""Translations that are drawn, against Hugging Face `generate(do_sample=True)` with our random numbers in the place of
its own: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason
from beamline.serving.engine.search.random_numbers import Uniforms
from tests.serving.engine.test_search_exact import Case, same, sources
from tests.support.engines import decode, make_engine, results
from tests.support.marian_shape import EOS, MAX_LENGTH, PAD, MarianShape

SAMPLES, SEED = 4, 11

CASES = (
    Case("all words"),
    same("cold", temperature=0.4),
    same("likeliest nine", top_k=9),
    same("nucleus", top_p=0.8, temperature=1.3),
    same("not too unlikely", min_p=0.1),
    same("at least twelve", min_length=12),
    same("penalty", repetition_penalty=1.7),
    same("suppressed", suppress_tokens=(9, 10, 17, 33)),
    same("at most nine", max_length=9),
    Case("forced end", {"forced_eos_id": EOS, "max_length": 8}, {"forced_eos_token_id": EOS, "max_length": 8}),
    Case("forced begin", {"forced_bos_id": 21}, {"forced_bos_token_id": 21}),
    Case("prefix", {"prefix": (20, 31)}, prefix=(20, 31)),
)


def drawn_by_hugging_face(model: MarianShape, source: list[int], case: Case, monkeypatch: Any) -> list[list[int]]:
    """The tokens behind the start, for every sample, to its end."""
    step = -1

    def draw(shares: Tensor, num_samples: int) -> Tensor:
        nonlocal step
        step += 1
        numbers = torch.tensor([[Uniforms(SEED, sample).at(step)] for sample in range(len(shares))])
        reached = shares.cumsum(1)
        return (reached <= numbers * reached[:, -1:]).sum(1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", draw)
    with torch.no_grad():
        found = model.original.generate(
            torch.tensor([source]),
            decoder_input_ids=torch.tensor([[PAD, *case.prefix]]),
            **{"max_length": MAX_LENGTH, "top_k": 0, "temperature": 1.0, **case.theirs},
            do_sample=True,
            num_beams=1,
            num_return_sequences=SAMPLES,
        )
    rows = [row[1 + len(case.prefix) :] for row in found.tolist()]
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_samples_are_those_of_generate(plain_model: MarianShape, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    texts = sources(6, seed=3)
    settings: dict[str, Any] = {"temperature": 1.0, "max_length": MAX_LENGTH, **case.ours}
    options = DecodingOptions(beam_size=SAMPLES, num_hypotheses=SAMPLES, seed=SEED, **settings)
    engine = make_engine(plain_model.folder, plain_model.manifest, slots=3)
    answers = results(decode(engine, [(tuple(text), options) for text in texts], stagger=1))
    for text, answer in zip(texts, answers, strict=True):
        expected = drawn_by_hugging_face(plain_model, text, case, monkeypatch)
        found = [[token for token in each.tokens if token != EOS] for each in answer.hypotheses]
        assert found == expected
        for hypothesis in answer.hypotheses:
            if hypothesis.finish_reason is FinishReason.LENGTH:
                assert len(hypothesis.tokens) <= options.max_length - 1
    assert len({tuple(each.tokens) for answer in answers for each in answer.hypotheses}) > len(texts)
