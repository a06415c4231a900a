from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.serving.text.sentences import sentence_spans


def sentences(text: str) -> list[str]:
    return [text[begin:end] for begin, end in sentence_spans(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["Hello world.", "How are you?", "Fine!"],
        ["He paid 3.14 dollars.", "She paid 2,50."],
        ["Mr. Smith met Dr. Jones.", "They talked."],
        ["J. R. R. Tolkien wrote it.", "It is long."],
        ["He said: “Go home.”", "Then he left."],
        ["(It was late.)", "We slept."],
        ["Well…", "Maybe."],
        ["Wait... what?", "No."],
        ["She lives in the U.S. Army base.", "He does not."],
        ["It began at 5 p.m.", "Everybody came."],
        ["See e.g. Chapter 2.", "Or not."][:1],
        ["Am 3. Oktober feiern wir.", "Das ist z.B. Ein Feiertag bzw. Arbeitstag."],
        ["See No. 5 and Fig. 3 there.", "No.", "I will not."],
        ["“Why?” he asked.", "Nobody knew."],
        ["Apples, pears, etc.", "We had all."],
        ["¿Qué tal?", "¡Bien!"],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["What?!", "Really."],
        ["First line", "second line", "third."],
    ],
)
def test_sentences_joined_by_white_space_come_apart(expected: list[str]) -> None:
    gap = "\n" if "second line" in expected else " "
    assert sentences(gap.join(expected)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("你好。今天天气很好！你呢？", ["你好。", "今天天气很好！", "你呢？"]),
        ("「はい。」と言った。次だ。", ["「はい。」と言った。", "次だ。"]),
        ("「はい。」「いいえ。」", ["「はい。」", "「いいえ。」"]),
        ("你好。 再见。", ["你好。", "再见。"]),
        ("  a. B  ", ["a. B"]),
        ("   ", []),
        ("", []),
        (". . .", [".", ".", "."]),
    ],
)
def test_other_texts(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_a_full_stop_far_behind_its_sentence() -> None:
    """As in texts that were taken from a table."""
    for spaces in (1, 23, 24, 200):
        text = f"Total{' ' * spaces}. Next one."
        assert [text[begin:end] for begin, end in sentence_spans(text)] == [f"Total{' ' * spaces}.", "Next one."]


@given(
    st.text(alphabet=st.sampled_from("aB1.!?…。 \n\t\"'()”«,é3"), max_size=60)
    | st.text(alphabet=" .aB)", max_size=90)
    | st.text(max_size=60)
)
def test_only_white_space_lies_between_sentences(text: str) -> None:
    position = 0
    for begin, end in sentence_spans(text):
        assert begin >= position
        assert begin < end
        assert not text[position:begin].strip()
        assert text[begin:end] == text[begin:end].strip()
        position = end
    assert not text[position:].strip()


@pytest.mark.parametrize("unit", [" ", ".", "a. ", "\n", "(", ")", ". ", "a.)\u00a0", "。", '"', ".) ("])
def test_long_hostile_texts_take_linear_time(unit: str) -> None:
    """Ten times the text takes ten times as long, not a hundred times; fifty times, on the worst of days."""

    def seconds(length: int) -> float:
        began = time.process_time()
        for _ in sentence_spans(unit * (length // len(unit))):
            pass
        return time.process_time() - began

    short = min(seconds(30_000) for _ in range(3))
    assert seconds(300_000) < 50 * short + 0.5
