"""Texts have the lengths that were asked for, and don't repeat unless they should."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.load.texts import SENTENCES, FileTexts, Fixed, Lognormal, SyntheticTexts, Uniform, read_lines
from beamline.loadtest.options import add_run_arguments, load_of


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


def test_lines_come_once_before_they_come_again():
    texts = FileTexts([str(number) for number in range(100)], seed=3)
    rounds = [[texts.text(100 * turn + number) for number in range(100)] for turn in range(2)]
    assert sorted(rounds[0], key=int) == sorted(rounds[1], key=int) == [str(number) for number in range(100)]
    assert rounds[0] != rounds[1]


def test_the_shipped_sentences_are_like_those_of_a_real_test_set():
    """All different, with the mix of lengths of en-de's test set."""
    lines = read_lines(SENTENCES)
    assert len(set(lines)) == len(lines) >= 100
    words = np.array([len(line.split()) for line in lines])
    assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx([7, 12, 22], abs=2)
    assert lines == [line.strip() for line in lines]
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    _, workload, _ = load_of(parser.parse_args(["--sentences", "--seed", "1"]))
    assert str(workload) == f"{len(lines)} shipped English sentences"
    assert {workload.request(number).text for number in range(len(lines))} == set(lines)
    with pytest.raises(LoadTestError, match="--texts and --sentences exclude each other"):
        load_of(parser.parse_args(["--sentences", "--texts", str(SENTENCES)]))


def test_a_file_without_text_is_refused(tmp_path: Path):
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(LoadTestError, match="every line is blank"):
        FileTexts(read_lines(tmp_path / "blank.txt"), 0)
    with pytest.raises(LoadTestError, match="can't be read"):
        read_lines(tmp_path / "none.txt")
