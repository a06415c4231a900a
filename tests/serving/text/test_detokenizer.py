"""Text as it comes: the pieces are the whole, whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from beamline.serving.text.detokenizer import Detokenizer, StopStrings
from beamline.serving.text.token_bytes import ByteTokenizer

BYTES = ByteTokenizer()


@given(st.text(), st.text(max_size=5))
def test_pieces_are_the_whole_text_and_never_half_a_character(text: str, before: str) -> None:
    text = text.replace("\ufffd", "")  # what half a character looks like
    detokenizer = Detokenizer(BYTES, BYTES.encode_prefix(before.replace("\ufffd", "")))
    pieces = [detokenizer.push(token) for token in BYTES.encode_prefix(text)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_is_never_finished_is_not_shown() -> None:
    detokenizer = Detokenizer(BYTES)
    tokens = BYTES.encode_prefix("ok 世")[:-1]
    assert "".join(detokenizer.push(token) for token in tokens) == "ok "
    assert detokenizer.flush() == ""


def test_broken_bytes_are_shown_as_such_once_something_follows() -> None:
    detokenizer = Detokenizer(BYTES)
    tokens = [3 + 0xE4, *BYTES.encode_prefix("x")]
    assert [detokenizer.push(token) for token in tokens] == ["", "\ufffdx"]


@given(st.text(), st.integers(0, 3))
def test_a_character_that_the_prompt_began_is_shown(text: str, cut: int) -> None:
    text = "世" + text.replace("\ufffd", "")
    tokens = BYTES.encode_prefix(text)
    detokenizer = Detokenizer(BYTES, [*BYTES.encode_prefix("a"), *tokens[:cut]])
    shown = "".join(map(detokenizer.push, tokens[cut:])) + detokenizer.flush()
    assert shown == (text if cut < 3 else text[1:])


def test_a_replacement_character_at_the_prompts_end_is_not_shown_again() -> None:
    for end in (BYTES.encode_prefix("\ufffd"), [3 + 0xE4]):
        detokenizer = Detokenizer(BYTES, end)
        assert [detokenizer.push(token) for token in BYTES.encode_prefix("xy")] == ["x", "y"]


class Counting(ByteTokenizer):
    """How many tokens it had to decode; `errors`: some tokenizers leave half a character out."""

    def __init__(self, errors: str = "replace") -> None:
        self.errors, self.decoded = errors, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return bytes(i - 3 for i in ids if i >= 3).decode("utf-8", errors=self.errors)


@pytest.mark.parametrize("errors", ["replace", "ignore"])
@pytest.mark.parametrize("tokens", [[2], [3 + 0x80], [3 + 0xE4], [3 + 0xE4, 2], [3 + 0xE4, *[2] * 30]], ids=str)
def test_tokens_that_make_no_character_are_not_decoded_again_and_again(errors: str, tokens: list[int]) -> None:
    tokenizer = Counting(errors)
    detokenizer = Detokenizer(tokenizer)
    ids = [*BYTES.encode_prefix("ab"), *(tokens * 2000)[:2000], *BYTES.encode_prefix("世 c")]
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert tokenizer.decoded < 150 * len(ids)
    assert shown == tokenizer.decode(ids)


_TOKENS = st.sampled_from([2, 2, *(3 + byte for byte in (*b"a ", 0x80, 0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0x98))])


@given(st.lists(_TOKENS, max_size=120))
def test_whatever_comes_the_pieces_are_the_whole(ids: list[int]) -> None:
    """Broken bytes, too. Special tokens inside of a character make two halves of it where there are very many."""
    detokenizer = Detokenizer(BYTES)
    ids = [token for place, token in enumerate(ids) if token != 2 or ids[:place][-1:] in ([], [2], [3 + 0x61])]
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    whole = BYTES.decode(ids)
    assert whole.startswith(shown)
    assert not whole[len(shown) :].strip("\ufffd")


def test_spaces_between_words_depend_on_what_was_before() -> None:
    """A tokenizer of the sentencepiece kind strips the space of a first word only."""
    library = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1, "!": 2}, unk_token="!"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()

    class Words(ByteTokenizer):
        def decode(self, ids):
            return library.decode(list(ids))

    first = Detokenizer(Words())
    assert [first.push(token) for token in (0, 1, 2)] == ["Hello", " world", "!"]
    later = Detokenizer(Words(), [0])
    assert [later.push(token) for token in (1, 2)] == [" world", "!"]
    nothing = 3  # a token that leaves no trace
    far = Detokenizer(Words(), [0])
    assert "".join(far.push(token) for token in (*[nothing] * 100, 1, *[nothing] * 100, 1)) == " world world"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_are_found_wherever_the_pieces_end(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    watch = StopStrings(stops)
    shown = "".join(watch.push(piece) for piece in pieces) + watch.flush()
    # The first place at which one of them is complete decides; of those, the longest one begins first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert watch.found == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(stop, len(shown)) for stop in stops)


def test_what_may_become_a_stop_string_is_held_back_and_let_go() -> None:
    watch = StopStrings(["</end>"])
    assert [watch.push(piece) for piece in ("a <", "/e", "nds <", "/end", "> b")] == ["a ", "", "</ends ", "", ""]
    assert watch.found
    assert watch.flush() == ""
