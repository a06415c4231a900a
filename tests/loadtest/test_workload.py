from __future__ import annotations

import argparse
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.loadtest.arrivals import Replay
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.methods import decoding_options, model_and_version
from beamline.loadtest.options import SENTENCES, add_run_arguments, load_of
from beamline.loadtest.trace import read_lines, read_trace
from beamline.loadtest.workload import FileTexts, Fixed, Lognormal, Mix, MixedWorkload, SyntheticTexts, Uniform, only


def mixed(texts, seed=0) -> MixedWorkload:
    models = Mix(("a", "b"), (3.0, 1.0))
    options = Mix(((), (("beam_size", "4"),)), (1.0, 1.0))
    return MixedWorkload(texts, models, options, seed)


@given(length=st.integers(1, 300), number=st.integers(0, 10**6))
def test_synthetic_texts_have_exactly_the_length(length, number):
    text = SyntheticTexts(Fixed(length), seed=1).text(number)
    assert len(text.encode()) == length
    assert text == " ".join(text.split())  # nothing that a server would strip or join


def test_synthetic_texts_differ_unless_asked_not_to():
    unique = SyntheticTexts(Lognormal(40, 0.5), seed=1)
    assert len({unique.text(number) for number in range(10_000)}) == 10_000
    repeated = SyntheticTexts(Lognormal(40, 0.5), seed=1, distinct=50)
    counts = Counter(repeated.text(number) for number in range(5000))
    assert len(counts) == 50
    assert set(counts.values()) == {100}


def test_lengths_follow_their_distribution():
    uniform = SyntheticTexts(Uniform(10, 20), seed=0)
    lengths = [len(uniform.text(number)) for number in range(2000)]
    assert (min(lengths), max(lengths)) == (10, 20)
    lognormal = SyntheticTexts(Lognormal(80, 0.5), seed=0)
    lengths = sorted(len(lognormal.text(number)) for number in range(2000))
    assert lengths[1000] == pytest.approx(80, rel=0.05)
    assert lengths[int(2000 * 0.841)] == pytest.approx(80 * 2.718**0.5, rel=0.1)


def test_a_request_is_the_same_whoever_sends_it():
    """Another process asks for other requests, in another order, from a copy."""
    first = mixed(SyntheticTexts(Lognormal(40, 0.5), seed=5), seed=5)
    items = [first.item(number) for number in range(6000)]
    copy = pickle.loads(pickle.dumps(first))
    assert [copy.item(number) for number in range(5999, -1, -7)] == items[5999::-7]


def test_another_seed_is_another_workload():
    texts = [mixed(SyntheticTexts(Lognormal(40, 0.5), seed), seed).item(0).text for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_mixes_keep_their_weights():
    workload = mixed(SyntheticTexts(Fixed(5), 0))
    items = [workload.item(number) for number in range(8000)]
    assert Counter(item.model for item in items)["a"] == pytest.approx(6000, rel=0.05)
    assert Counter(item.options for item in items)[()] == pytest.approx(4000, rel=0.05)
    assert len(workload.kinds()) == 4


def test_lines_come_once_before_they_come_again():
    texts = FileTexts([str(number) for number in range(100)], seed=3)
    rounds = [[texts.text(100 * turn + number) for number in range(100)] for turn in range(2)]
    assert sorted(rounds[0], key=int) == sorted(rounds[1], key=int) == [str(number) for number in range(100)]
    assert rounds[0] != rounds[1]


def test_the_shipped_sentences_are_like_those_of_a_real_test_set():
    """All different, with the mix of lengths of the test set that docs/throughput.md was measured with."""
    lines = read_lines(SENTENCES)
    assert len(set(lines)) == len(lines) >= 100
    words = np.array([len(line.split()) for line in lines])
    assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx([7, 12, 22], abs=2)
    assert lines == [line.strip() for line in lines]
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    _, workload, _ = load_of(parser.parse_args(["--sentences", "--seed", "1"]))
    assert str(workload) == f"{len(lines)} shipped English sentences"
    assert {workload.item(number).text for number in range(len(lines))} == set(lines)
    with pytest.raises(LoadTestError, match="--texts and --sentences exclude each other"):
        load_of(parser.parse_args(["--sentences", "--texts", str(SENTENCES)]))


def test_a_file_without_text_is_refused(tmp_path: Path):
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(LoadTestError, match="every line is blank"):
        FileTexts(read_lines(tmp_path / "blank.txt"), 0)
    with pytest.raises(LoadTestError, match="can't be read"):
        read_lines(tmp_path / "none.txt")


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path):
    lines = [
        {"time": 12.5, "text": "second", "options": {"beam_size": 4, "return_scores": True}},
        {"time": 10.0, "text": "first", "model": "other"},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    replay, workload = read_trace(path, "m", speed=2.0)
    assert replay == Replay((0.0, 2.5), 2.0)
    assert [(item.text, item.model) for item in workload.items] == [("first", "other"), ("second", "m")]
    assert decoding_options(workload.item(1).options).beam_size == 4
    assert workload.item(2) == workload.item(0)
    assert {item.model for item in workload.kinds()} == {"m", "other"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "no time"}', "time: Field required"),
        ('{"time": "soon", "text": ""}', "time: Input should be a valid number"),
        ('{"time": 1, "text": "a", "beam": 4}', "beam: Extra inputs"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, line, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "text": "fine"}\n' + line)
    with pytest.raises(LoadTestError, match=f"request 2: {reason}"):
        read_trace(path, "", 1.0)


def test_options_become_those_of_the_protocol():
    texts = {"beam_size": "4", "length_penalty": "0.6", "return_scores": "true", "target_prefix": "Das"}
    options = decoding_options((*texts.items(), ("early_stopping", "EARLY_STOPPING_NEVER")))
    assert (options.beam_size, options.return_scores, options.target_prefix) == (4, True, "Das")
    assert options.length_penalty == pytest.approx(0.6)
    assert options.early_stopping == 3
    with pytest.raises(LoadTestError, match="there is no option 'beams'"):
        decoding_options((("beams", "4"),))
    for name, value in (("beam_size", "four"), ("return_scores", "yes"), ("suppress_tokens", "3")):
        with pytest.raises(LoadTestError, match=f"option {name} can't be"):
            decoding_options(((name, value),))


def test_a_model_may_name_its_version():
    assert model_and_version("en-de/2") == ("en-de", "2")
    assert model_and_version("org/en-de") == ("org/en-de", "")
    assert only("x").choices == ("x",)
