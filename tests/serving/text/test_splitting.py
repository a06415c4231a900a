from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from beamline.serving.text.splitting import Layout, split
from beamline.serving.text.token_bytes import ByteTokenizer

LIMIT = 16
TEXTS = st.text(max_size=200) | st.text(alphabet=st.sampled_from("ab. ,。，!?\n e\u0301"), max_size=300)


def restored(layout: Layout) -> str:
    return layout.lead + "".join(chain.from_iterable(zip(layout.parts, layout.gaps, strict=True)))


@given(TEXTS)
def test_parts_and_gaps_are_the_text(text: str) -> None:
    layout, _ = split(text, ByteTokenizer(), LIMIT)
    assert restored(layout) == text
    assert layout.join(layout.parts) == text
    assert all(not gap.strip() for gap in (layout.lead, *layout.gaps))
    assert all(part == part.strip() and part for part in layout.parts)


@given(TEXTS)
def test_every_part_fits_and_has_its_ids(text: str) -> None:
    layout, ids = split(text, ByteTokenizer(), LIMIT)
    assert [ByteTokenizer().encode(part) for part in layout.parts] == ids
    assert all(len(part_ids) <= LIMIT for part_ids in ids)


def test_a_long_sentence_is_cut_behind_clauses_first_then_at_spaces() -> None:
    text = "one two three, four five six, seven eight nine ten eleven"
    layout, _ = split(text, ByteTokenizer(), 32)
    assert layout.parts[0].endswith(",")
    assert not any(part.startswith(" ") for part in layout.parts)


def test_a_word_without_end_is_cut_anywhere() -> None:
    layout, ids = split("x" * 1000, ByteTokenizer(), 10)
    assert "".join(layout.parts) == "x" * 1000
    assert max(map(len, ids)) <= 10


def test_a_cut_never_parts_a_letter_from_its_accent() -> None:
    layout, _ = split("e\u0301" * 200, ByteTokenizer(), 11)
    assert not any(part.startswith("\u0301") for part in layout.parts)


def test_a_character_that_is_longer_than_the_limit_stays_whole() -> None:
    layout, ids = split("😀", ByteTokenizer(), 3)
    assert layout.parts == ("😀",)
    assert len(ids[0]) == 5


def test_joining_gives_latin_translations_of_chinese_a_space() -> None:
    layout, _ = split("你好。再见。", ByteTokenizer(), 64)
    assert layout.join(["Hello.", "Goodbye."]) == "Hello. Goodbye."
    assert layout.join(["你好。", "再见。"]) == "你好。再见。"


def test_layout_is_kept() -> None:
    layout, _ = split("\n  One.  Two.\n\n\tThree.\n", ByteTokenizer(), 64)
    assert layout.join(["1", "2", "3"]) == "\n  1  2\n\n\t3\n"
