"""`stop_strings` of encoder-decoders: as `generate` honours them, in a checkpoint and in a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from beamline import LoadedModel, load
from beamline.converters.families import converter_for
from tests.converters.test_unsupported import edit, reasons_of
from tests.support.seq2seq import BART, T5, ConvertedSeq2Seq, convert_seq2seq, write_seq2seq
from tests.support.text import english_lines

LENGTH = 60


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> ConvertedSeq2Seq:
    return convert_seq2seq(T5, tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(converted: ConvertedSeq2Seq) -> Iterator[LoadedModel]:
    with load(converted.folder, threads=1) as loaded:
        yield loaded


def theirs(model: ConvertedSeq2Seq, text: str, stops: list[str]) -> list[int]:
    """What `generate` writes behind the start token."""
    tokenizer = model.shape.make_tokenizer()
    given: dict[str, Any] = {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}
    inputs = tokenizer(text, return_tensors="pt")
    found = model.original.generate(**inputs, max_length=LENGTH, num_beams=1, do_sample=False, **given)
    return [int(token) for token in found[0][1:]]


def some_stops(model: ConvertedSeq2Seq, line: str) -> Iterator[list[str]]:
    """Pieces of what it would write: of one token, across tokens, of several that are found, and none."""
    tokenizer = model.shape.make_tokenizer()
    written = theirs(model, line, [])
    words = tokenizer.decode(written, skip_special_tokens=True).split()
    # What a reader does not see, special tokens and rows without a word, are letters for them, and nothing for us.
    rows_without = range(len(tokenizer), model.manifest.vocabulary.target_size)
    unseen = {*tokenizer.all_special_ids, *rows_without} - {tokenizer.eos_token_id}
    if len(words) < 4 or not unseen.isdisjoint(written):
        return
    first, second = words[1:3]
    yield [first]
    yield [f"{first[-1:]} {second[:2]}"]
    yield [words[-1], f"{second}"]
    yield ["nowhere to be found"]


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.full)])
@torch.no_grad()
def test_translations_end_where_generate_ends(converted: ConvertedSeq2Seq, model: LoadedModel, count: int) -> None:
    tokenizer = converted.shape.make_tokenizer()
    cases = ((line, stops) for line in english_lines()[::25] for stops in some_stops(converted, line))
    stopped = 0
    for line, stops in islice(cases, count):
        expected = theirs(converted, line, stops)
        options: dict[str, Any] = {"stop": stops, "beam_size": 1, "max_length": LENGTH, "return_tokens": True}
        answer = model.translate(line, return_scores=True, **options)
        (found,) = answer.hypotheses
        assert [token.id for token in found.tokens] == expected
        whole = tokenizer.decode(expected, skip_special_tokens=True)
        places = [place for stop in stops if (place := whole.find(stop)) >= 0]
        assert found.text == whole[: min(places, default=None)]
        assert found.finish_reason == "stop" or not places
        assert found.score == pytest.approx(sum(found.token_log_probs) / len(expected), abs=1e-5)
        pieces = list(model.translate_stream(line, **options))
        assert "".join(piece.text for piece in pieces) == found.text
        assert pieces[-1].translation is not None
        assert [token.id for token in pieces[-1].translation.hypotheses[0].tokens] == expected
        stopped += bool(places)
    assert stopped >= count / 2


def test_a_prefix_is_not_searched(model: LoadedModel) -> None:
    line = english_lines()[25]
    plain = model.translate(line, beam_size=1, max_length=LENGTH, target_prefix="the file")
    stopped = model.translate(line, beam_size=1, max_length=LENGTH, target_prefix="the file", stop="file")
    assert plain.text.startswith("the file")
    assert stopped.text == "the file" + plain.text.removeprefix("the file").partition("file")[0]


def test_samples_and_traces_end_there_too(model: LoadedModel) -> None:
    line = english_lines()[50]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "num_hypotheses": 4, "max_length": LENGTH}
    free = model.translate(line, **options)
    cut = model.translate(line, **options, stop=["e"], return_search_trace=True)
    assert len(free.hypotheses) == len(cut.hypotheses) == 4
    assert any("e" in each.text for each in free.hypotheses)
    assert [each.text for each in cut.hypotheses] == [each.text.partition("e")[0] for each in free.hypotheses]
    (trace,) = cut.search_traces
    assert [step.number for step in trace.steps] == list(range(len(trace.steps)))


def test_what_a_checkpoint_says(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, replace(BART, generation={**BART.generation, "num_beams": 1}))
    edit(folder / "generation_config.json", stop_strings=["\n", "END"])
    assert converter_for(folder).load().defaults.stop == ("\n", "END")
    edit(folder / "generation_config.json", stop_strings="END", num_beams=4, typical_p=0.5, max_time=1.0)
    beams, time = reasons_of(folder)
    assert beams.startswith("generation settings stop_strings and num_beams 4: beams that end at a text are not")
    assert time == "generation setting max_time is 1.0, which is not supported"
