"""Converted tokenizers against the originals: identical ids, identical text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MarianMTModel, MarianTokenizer

from beamline.converters.checkpoints.sentencepiece_files import from_marian, from_sentencepiece
from beamline.serving.errors import UnsupportedCheckpoint
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.marian import train_sentencepiece, write_marian_directory
from tests.support.text import english_lines, odd_lines

FORMS: dict[str, dict[str, Any]] = {
    "unigram": {"user_defined_symbols": ["<sep>", "[X]", "\ufb01", "a"], "control_symbols": ["<c>"]},
    "unigram-bytes": {"byte_fallback": True, "vocab_size": 700},
    "unigram-identity": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe-bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 700},
    "char-suffix": {"model_type": "char", "treat_whitespace_as_suffix": True},
}


@dataclass(frozen=True)
class Pair:
    original: sentencepiece.SentencePieceProcessor
    converted: TextTokenizer


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directory = tmp_path_factory.mktemp("spm")
    made = {}
    for name, options in FORMS.items():
        path = train_sentencepiece(directory / f"{name}.model", english_lines()[:1000], **options)
        from_sentencepiece(path, add_eos=True).save(directory / f"{name}.json")
        original = sentencepiece.SentencePieceProcessor(model_file=str(path))
        made[name] = Pair(original, TextTokenizer.load(directory / f"{name}.json"))
    return made


@dataclass(frozen=True)
class MarianPair:
    original: Any
    source: TextTokenizer
    target: TextTokenizer


@pytest.fixture(scope="session", params=["joint", "separate"])
def marian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MarianPair:
    directory = write_marian_directory(
        tmp_path_factory.mktemp("marian"),
        language_codes=(">>fr<<", ">>de<<") if request.param == "joint" else (),
        separate_vocabs=request.param == "separate",
    )
    return _convert(directory)


def _convert(directory: Path) -> MarianPair:
    source, target = from_marian(directory)
    source.save(directory / "source_tokenizer.json")
    target.save(directory / "target_tokenizer.json")
    return MarianPair(
        MarianTokenizer.from_pretrained(directory, local_files_only=True),
        TextTokenizer.load(directory / "source_tokenizer.json"),
        TextTokenizer.load(directory / "target_tokenizer.json"),
    )


def _lines() -> list[str]:
    return english_lines()[1000:4500] + odd_lines(1500)


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_text_equal_sentencepiece(pairs: dict[str, Pair], form: str) -> None:
    pair = pairs[form]
    for line in _lines():
        ids = pair.original.encode(line)
        assert pair.converted.encode(line) == [*ids, pair.original.eos_id()], ascii(line)
        assert pair.converted.decode(ids) == pair.original.decode(ids), ascii(line)


@pytest.mark.parametrize("form", FORMS)
def test_any_ids_decode_as_in_sentencepiece(pairs: dict[str, Pair], form: str) -> None:
    """What a model generates tokenises no text: broken bytes, control symbols, spaces in front."""
    pair = pairs[form]
    rng = random.Random(1)
    size = pair.original.get_piece_size()
    assert pair.converted.vocab_size == size
    for _ in range(2000):
        ids = [rng.randrange(rng.choice((10, 300, size)) % (size + 1)) for _ in range(rng.randrange(12))]
        assert pair.converted.decode(ids) == pair.original.decode(ids), ids


@pytest.mark.parametrize("form", FORMS)
@given(text=st.text())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_ids_of_arbitrary_text(pairs: dict[str, Pair], form: str, text: str) -> None:
    pair = pairs[form]
    assert pair.converted.encode_prefix(text) == pair.original.encode(text)


def test_a_tie_is_decided_by_what_stands_before_it(pairs: dict[str, Pair]) -> None:
    """Equal path scores, decided by the rounding of 32-bit floats along the whole text."""
    pair = pairs["unigram"]
    for before in english_lines()[:300:10]:
        for n in range(3, 40):
            text = f"{before} {'*' * n} {'=' * n}"
            assert pair.converted.encode_prefix(text) == pair.original.encode(text), text


def test_control_symbols_in_a_text_are_plain_text(pairs: dict[str, Pair]) -> None:
    pair = pairs["unigram"]
    assert pair.original.eos_id() not in pair.converted.encode_prefix("a </s> b")


def test_marian_ids_and_text(marian: MarianPair) -> None:
    for line in [*_lines(), ">>fr<< hello", ">>fr<<", ">>xx<< what", ">>de<<>>fr<< a", "a >>fr<< b"]:
        ids = marian.original(line)["input_ids"]
        assert marian.source.encode(line) == ids, ascii(line)
        target = marian.original(text_target=line)["input_ids"]
        assert marian.target.encode(line) == target, ascii(line)
        for some in (ids, target):
            expected = marian.original.decode(some, skip_special_tokens=True)
            assert marian.target.decode(some) == expected, ascii(line)


def test_marian_decodes_any_ids(marian: MarianPair) -> None:
    rng = random.Random(2)
    size = marian.target.vocab_size
    for _ in range(2000):
        ids = [rng.randrange(size) for _ in range(rng.randrange(12))]
        assert marian.target.decode(ids) == marian.original.decode(ids, skip_special_tokens=True), ids


def test_marian_looks_an_unknown_run_up_in_the_shared_vocabulary(marian: MarianPair) -> None:
    """The source does not know the letter, the vocabulary has it from the target."""
    if marian.original.separate_vocabs:
        pytest.skip("needs a shared vocabulary")
    letter = "\u00fc"
    assert letter not in [marian.original.spm_source.id_to_piece(i) for i in range(400)]
    assert marian.source.encode(f"a{letter}") == marian.original(f"a{letter}")["input_ids"]
    assert marian.original.encoder[letter] in marian.source.encode(f"a{letter}")


def test_marian_sides_with_their_own_vocabularies(marian: MarianPair) -> None:
    """Hugging Face has only the target's tokens; ours show each side's own."""
    if not marian.original.separate_vocabs:
        pytest.skip("needs separate vocabularies")
    for index, token in ((i, t) for t, i in marian.original.encoder.items()):
        assert marian.source.token(index) == token
    assert marian.source.decode(marian.source.encode("The value is evaluated.")) == "The value is evaluated."


@pytest.mark.parametrize("clean_up", [False, True])
def test_marian_cleans_up_as_the_directory_says(tmp_path: Path, clean_up: bool) -> None:
    directory = write_marian_directory(tmp_path, vocab_size=300)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": clean_up}))
    pair = _convert(directory)
    ids = pair.original("do n't stop , it 's here .")["input_ids"]
    text = pair.target.decode(ids)
    assert text == pair.original.decode(ids, skip_special_tokens=True)
    assert (" ," in text) is not clean_up


def test_the_marian_directory_is_one_that_hugging_face_loads(tmp_path: Path) -> None:
    write_marian_directory(tmp_path, vocab_size=300, max_length=12, scale=3.0, seed=5)
    tokenizer: Any = MarianTokenizer.from_pretrained(tmp_path, local_files_only=True)
    model: Any = MarianMTModel.from_pretrained(tmp_path, local_files_only=True)
    assert model.final_logits_bias.abs().sum() > 0
    output = model.generate(**tokenizer(["The value of the expression."], return_tensors="pt"))[0].tolist()
    assert output[0] == model.config.decoder_start_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id not in output[1:]
    assert len(output) <= 12


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(b"\xff\xfe nothing of the kind")
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.model"):
        from_sentencepiece(tmp_path / "m.model", add_eos=True)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe nothing of the kind"])
def test_a_marian_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "source.spm").write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match=r"source\.spm"):
        from_marian(tmp_path)


def test_bos_and_eos(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "m.model", english_lines()[:300], vocab_size=100)
    both = TextTokenizer.from_json(from_sentencepiece(path, add_eos=True, add_bos=True).to_json())
    plain = TextTokenizer.from_json(from_sentencepiece(path, add_eos=False).to_json())
    assert plain.encode("the value") == plain.encode_prefix("the value") == both.encode_prefix("the value")
    assert both.tokens(both.encode("a"))[0] == "<s>"
    assert both.tokens(both.encode("a"))[-1] == "</s>"


def test_a_model_without_bos_and_eos(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "m.model", english_lines()[:300], vocab_size=100, bos_id=-1, eos_id=-1)
    with pytest.raises(UnsupportedCheckpoint, match=r"no beginning of sentence\W.*no end of sentence"):
        from_sentencepiece(path, add_eos=True, add_bos=True)
