from __future__ import annotations

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from beamline.serving.errors import InvalidRequest, ModelError
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.text import english_lines

# sentencepiece's generated module builds its classes at run time, out of sight of a type checker.
protobuf: Any = sentencepiece_model_pb2

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_PIECES = [
    ("<unk>", 0.0, _UNKNOWN),
    ("</s>", 0.0, _CONTROL),
    ("\u2581", -2.0, _NORMAL),
    ("a", -3.0, _NORMAL),
    ("b", -3.0, _NORMAL),
    ("ab", -4.0, _NORMAL),
    ("\u2581ab", -3.0, _NORMAL),
]


def _model(pieces: list[tuple[str, float, int]]) -> str:
    model = protobuf.ModelProto()
    for piece, score, kind in pieces:
        model.pieces.add(piece=piece, score=score, type=kind)
    return base64.b64encode(model.SerializeToString()).decode()


def _tokenizer(**changes: Any) -> TextTokenizer:
    return TextTokenizer.from_json({"beamline": {"sentencepiece": _model(_PIECES), "suffix": [1], **changes}})


def _marian(**changes: Any) -> TextTokenizer:
    vocabulary = {"</s>": 0, "<unk>": 1, "\u2581": 2, "\u2581ab": 3, "xy": 4, ">>fr<<": 5, "b": 7, "<pad>": 8}
    marian = {
        "vocabulary": vocabulary,
        "unknown": 1,
        "added": {"</s>": 0, "<unk>": 1, "<pad>": 8},
        "hidden": [0, 1, 8],
        **changes,
    }
    return _tokenizer(suffix=[0], marian=marian)


@pytest.fixture
def rust_file(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_plain_tokenizers_file(rust_file: Path) -> None:
    tokenizer = TextTokenizer.load(rust_file)
    assert tokenizer.encode("hello world hello") == [2, 3, 2, 1], "and the file's truncation is not applied"
    assert tokenizer.encode_prefix("hello") == [2]
    assert tokenizer.encode_batch(["hello", "hello world"]) == [[2, 1], [2, 3, 1]]
    assert tokenizer.decode([2, 3, 1]) == "hello world"
    assert tokenizer.tokens([2, 1]) == ["hello", "</s>"]
    assert tokenizer.vocab_size == 4
    assert tokenizer.decode([2, 99, -1]) == "hello"
    assert tokenizer.token(99) == tokenizer.token(-1) == ""


def test_others_go_on_while_a_large_text_is_encoded(tmp_path: Path) -> None:
    """Without merges, every character is a token, and the library takes its time."""
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.load(tmp_path / "tokenizer.json")
    with ThreadPoolExecutor(1) as pool:
        encoding, turns = pool.submit(tokenizer.encode, "ab" * 500_000), 0
        while not encoding.done():
            turns += 1
        assert len(encoding.result()) == 1_000_000
    assert turns > 1000


def test_spaces_around_a_greedy_token_are_its_own() -> None:
    """However many: a pattern that begins with spaces would look at each of them again and again."""
    spec = {"offset": 3, "suffix": [1], "added": {"</s>": 1, "<x>": 259}, "hidden": [1], "greedy": ["</s>"]}
    tokenizer = TextTokenizer.from_json({"beamline": {"bytes": spec}})
    assert tokenizer.encode("a  </s>\t </s> b <x> c") == [100, 1, 1, 101, 35, 259, 35, 102, 1]
    assert len(tokenizer.encode("a" + " " * 300_000 + "b")) == 300_003


def test_a_sentencepiece_file() -> None:
    tokenizer = _tokenizer(prefix=[3])
    assert tokenizer.encode(" ab  b ") == [3, 6, 2, 4, 1]
    assert tokenizer.encode_batch(["ab", ""]) == [[3, 6, 1], [3, 1]]
    assert tokenizer.encode_prefix("ab") == [6]
    assert tokenizer.decode([6, 2, 4, 1]) == "ab b"
    assert tokenizer.tokens([6, 1]) == ["\u2581ab", "</s>"]
    assert tokenizer.vocab_size == 7
    assert tokenizer.decode([6, 99, -1]) == "ab"
    assert tokenizer.decode([]) == tokenizer.decode([1, 99]) == ""
    assert tokenizer.token(99) == tokenizer.token(-1) == ""


def test_unknown_characters_become_one_token() -> None:
    assert _tokenizer().encode_prefix("xyz") == [2, 0]
    assert _tokenizer().decode([0]) == " \u2047 "


def test_marian_numbers_pieces_by_its_vocabulary() -> None:
    tokenizer = _marian()
    assert tokenizer.encode("xy ab xyz") == [2, 4, 3, 2, 1, 0], "an unknown run is looked up as a whole"
    assert tokenizer.encode_prefix(">>fr<< ab</s>>>fr<<ab") == [5, 3, 0, 5, 3]
    assert tokenizer.decode([5, 3, 2, 7, 0]) == ">>fr<< ab b"
    assert tokenizer.decode([3, 6, 99, -1, 8]) == "ab", "6 is not in the vocabulary"
    assert tokenizer.tokens([3, 8, 6, 99, -1]) == ["\u2581ab", "<pad>", "", "", ""]
    assert tokenizer.vocab_size == 9


def test_marian_may_decode_by_another_model() -> None:
    """Only the decoding model says that `xy` is a control symbol."""
    other = _model([*_PIECES, ("xy", 0.0, _CONTROL)])
    assert _marian().decode([3, 4]) == "abxy"
    assert _marian(decoding=other).decode([3, 4]) == "ab"


def test_a_lone_surrogate_is_the_callers_mistake(rust_file: Path) -> None:
    for tokenizer in (TextTokenizer.load(rust_file), _tokenizer(), _marian()):
        with pytest.raises(InvalidRequest, match="surrogate at character 1"):
            tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"beamline": {}}',
        '{"beamline": null}',
        '{"beamline": {"sentencepiece": ""}}',
        '{"beamline": {"sentencepiece": "no base64!"}}',
        '{"beamline": {"sentencepiece": "QUJD"}}',
        json.dumps({"beamline": {"sentencepiece": _model(_PIECES), "unheard_of": 1}}),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "source_tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"source_tokenizer\.json"):
        TextTokenizer.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.json"):
        TextTokenizer.load(tmp_path / "nothing.json")


def test_many_threads() -> None:
    texts = english_lines()[:300] + [f"ab{'ab' * (i % 7)}{i}" for i in range(500)]
    for tokenizer in (_tokenizer(), _marian()):
        expected = tokenizer.encode_batch(texts)
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(tokenizer.encode_batch, [texts] * 8):
                assert got == expected


def test_the_server_needs_no_torch() -> None:
    code = (
        "import sys, beamline.serving.text.tokenizer; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
