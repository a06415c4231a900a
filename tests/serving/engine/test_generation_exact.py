"""Language models in our engine against Hugging Face `generate` on the same random weights."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason
from tests.serving.engine.test_search_exact import Case, Theirs, compare, same
from tests.support.engines import decode, make_engine, results
from tests.support.language_models import (
    EOS,
    GPT2,
    POSITIONS,
    SECOND_EOS,
    VOCABULARY,
    ConvertedLanguageModel,
    convert_language_model,
)

BEAMS = (1, 2, 4, 5, 8)
LONGEST_PROMPT, NEW_TOKENS = 60, 40
CASES = (
    Case("defaults"),
    same("length penalty 0", length_penalty=0.0),
    same("length penalty 2", length_penalty=2.0),
    same("early stopping", early_stopping=True),
    same("never stop early", early_stopping="never"),
    Case("min length", {"min_length": 13}, {"min_new_tokens": 12}),
    Case("max length", {"max_length": 9}, {"max_new_tokens": 8}),
    same("no repeated bigrams", no_repeat_ngram_size=2),
    same("repetition penalty", repetition_penalty=1.7),
    Case(
        "bad words",
        {"bad_words": ((11,), (12, 13), (14, 15, 16))},
        {"bad_words_ids": [[11], [12, 13], [14, 15, 16]]},
    ),
    same("suppressed", suppress_tokens=(9, 10, 17, 33)),
    same("all at once", repetition_penalty=1.3, no_repeat_ngram_size=3, early_stopping=True),
)


def new_tokens(beams: int) -> int:
    """The engine refuses what might need more room than it has: the prompt once, and each beam's tokens."""
    return min(NEW_TOKENS, (2 * POSITIONS - LONGEST_PROMPT) // beams - 1)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Lengths 1 to 60, and every count has a short and a long one."""
    chance = random.Random(seed)
    lengths = ([1, LONGEST_PROMPT] + [chance.randint(1, LONGEST_PROMPT) for _ in range(count)])[:count]
    return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def hugging_face(original: Any, prompt: list[int], case: Case, beams: int) -> list[Theirs]:
    options: dict[str, Any] = {"max_new_tokens": new_tokens(beams), "length_penalty": 1.0, **case.theirs}
    if beams == 1:
        options.pop("early_stopping", None)
        options.pop("length_penalty", None)
    found = original.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        eos_token_id=[EOS, SECOND_EOS],
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    # Greedy's scores are edited logits, beam search's are log-probabilities.
    transitions = original.compute_transition_scores(
        found.sequences, found.scores, getattr(found, "beam_indices", None), normalize_logits=beams == 1
    )
    answers = []
    for row in range(beams):
        tokens = found.sequences[row, len(prompt) :].tolist()
        ends = [index for index, token in enumerate(tokens) if token in (EOS, SECOND_EOS)]
        length = ends[0] + 1 if ends else len(tokens)
        score = None if beams == 1 else float(found.sequences_scores[row])
        answers.append(Theirs(tokens[:length], transitions[row, :length].tolist(), score))
    return answers


def check(model: ConvertedLanguageModel, case: Case, beams: int, batch: int, seed: int, stagger: int = 0) -> None:
    length = new_tokens(beams) + 1
    options = DecodingOptions(**{"beam_size": beams, "num_hypotheses": beams, "max_length": length, **case.ours})
    batch_prompts = prompts(batch, seed)
    engine = make_engine(model.folder, model.manifest)
    answers = results(decode(engine, [(prompt, options) for prompt in batch_prompts], stagger))
    for prompt, answer in zip(batch_prompts, answers, strict=True):
        theirs = hugging_face(model.original, prompt, case, beams)
        assert len(answer.hypotheses) == len(theirs)
        for rank, (mine, other) in enumerate(zip(answer.hypotheses, theirs, strict=True)):
            compare(mine, other, f"{case.name}, beam {beams}, prompt of {len(prompt)}, rank {rank}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_option(language_model: ConvertedLanguageModel, case: Case) -> None:
    for beams in (1, 4):
        check(language_model, case, beams, batch=3, seed=beams)


@pytest.mark.parametrize("beams", BEAMS)
def test_every_beam_width_joining_by_and_by(language_model: ConvertedLanguageModel, beams: int) -> None:
    check(language_model, CASES[0], beams, batch=4, seed=10 + beams, stagger=3)


def test_texts_vary_and_end_by_themselves(language_model: ConvertedLanguageModel) -> None:
    """The model must be worth comparing on."""
    options = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=NEW_TOKENS + 1)
    engine = make_engine(language_model.folder, language_model.manifest)
    found = [r.hypotheses[0] for r in results(decode(engine, [(p, options) for p in prompts(16, 3)]))]
    assert len({hypothesis.tokens for hypothesis in found}) >= 12
    assert sum(hypothesis.finish_reason is FinishReason.EOS for hypothesis in found) >= 4
    assert max(len(hypothesis.tokens) for hypothesis in found) > 12


def test_mixed_widths_in_one_batch(language_model: ConvertedLanguageModel) -> None:
    widths = (1, 2, 4, 5, 1, 4)
    base = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=NEW_TOKENS + 1)
    batch = [
        (prompt, replace(base, beam_size=width, num_hypotheses=width, max_length=new_tokens(width) + 1))
        for prompt, width in zip(prompts(len(widths), 5), widths, strict=True)
    ]
    answers = results(decode(make_engine(language_model.folder, language_model.manifest), batch, stagger=2))
    for (prompt, options), answer in zip(batch, answers, strict=True):
        theirs = hugging_face(language_model.original, prompt, CASES[0], options.beam_size)
        for mine, other in zip(answer.hypotheses, theirs, strict=True):
            compare(mine, other, f"width {options.beam_size}")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> ConvertedLanguageModel:
    return convert_language_model(GPT2, Path(tmp_path_factory.mktemp("gpt2")))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("beams", BEAMS)
def test_whole_grid(
    language_model: ConvertedLanguageModel, gpt2: ConvertedLanguageModel, case: Case, beams: int
) -> None:
    for batch in (1, 2, 7, 16):
        check(language_model, case, beams, batch, seed=100 * beams + batch)
    check(gpt2, case, beams, batch=8, seed=beams)
    check(gpt2, case, beams, batch=6, seed=50 + beams, stagger=2)
