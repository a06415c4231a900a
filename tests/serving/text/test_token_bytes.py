from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from beamline.serving.text.token_bytes import EOS_ID, ByteTokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_goes_in_comes_out(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == [*tokenizer.encode_prefix(text), EOS_ID]
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_tokens_can_be_shown() -> None:
    tokenizer = ByteTokenizer()
    assert [tokenizer.token(i) for i in (0, 1, 2, 3, 3 + ord("a"), 258)] == [
        "<pad>",
        "<s>",
        "</s>",
        "<0x00>",
        "a",
        "<0xFF>",
    ]


def test_half_a_character_is_shown_as_one_that_is_broken() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("ü")[:1]) == "\ufffd"
