"""The languages of a request become the tokens that Hugging Face's own tokenizers put around a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import beamline
from beamline.converters.families import converter_for
from beamline.converters.families.marian import MarianConverter
from beamline.converters.tasks.generation import LoadedModel
from beamline.errors import InvalidRequest as ClientError
from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import TextLimits
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.languages import LanguageReader
from beamline.serving.text.model_card import ModelCard
from beamline.serving.text.tokenizer import TextTokenizer
from beamline.serving.text.translation_inputs import TranslationReader
from tests.support.marian import write_marian_directory
from tests.support.seq2seq import NLLB, SHAPES, ConvertedSeq2Seq, Seq2SeqShape, convert_seq2seq, write_seq2seq

TEXT = "The value of the first argument. And a second sentence!"
MULTILINGUAL = [shape for shape in SHAPES if shape.name in ("mbart-25", "mbart-50", "m2m100", "nllb", "nllb-legacy")]
MADLAD = next(shape for shape in SHAPES if shape.name == "madlad")


def card_of_loaded(loaded: LoadedModel) -> ModelCard:
    return ModelCard(
        name="tiny",
        version=1,
        vocabulary=loaded.vocabulary,
        limits=loaded.limits,
        defaults=loaded.defaults,
        source_languages=loaded.source_languages,
        target_languages=loaded.target_languages,
        languages=loaded.languages,
    )


def reader_of(loaded: LoadedModel, folder: Path) -> TranslationReader:
    loaded.source_tokenizer.save(folder / "served.json")
    tokenizer = TextTokenizer.load(folder / "served.json")
    return TranslationReader(card_of_loaded(loaded), tokenizer, tokenizer, TextLimits())


def read(reader: TranslationReader, text: str, source: str = "", target: str = "", **options: Any) -> Any:
    request = pb.TranslateRequest(
        inputs=[pb.Input(text=text)],
        source_language=source,
        target_language=target,
        options=pb.DecodingOptions(**options),
    )
    (prepared,) = reader.read(request)
    return prepared.requests


@pytest.mark.parametrize("shape", MULTILINGUAL, ids=lambda shape: shape.name)
def test_every_code_is_the_tokenizers_own(shape: Seq2SeqShape, tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path / "checkpoint", shape)
    loaded = converter_for(folder).load()
    reader, original = reader_of(loaded, tmp_path), AutoTokenizer.from_pretrained(folder)
    languages = loaded.languages
    assert languages is not None
    assert len(languages.target) >= 25
    for number, language in enumerate(languages.source):
        other = languages.target[-number]
        (request,) = read(reader, TEXT, language.code, other.code)
        original.src_lang = language.code
        assert list(request.source) == original(TEXT)["input_ids"]
        options = request.options
        if shape.name == "mbart-25":
            assert (options.start_id, options.forced_bos_id) == (other.id, None)
        else:
            assert (options.start_id, options.forced_bos_id) == (None, other.id)
        # With a prefix, that comes behind the language.
        (request,) = read(reader, TEXT, language.code, other.code, target_prefix="value")
        prefix = original("value", add_special_tokens=False)["input_ids"]
        forced = [] if shape.name == "mbart-25" else [other.id]
        assert list(request.options.prefix) == [*forced, *prefix]


def test_standard_tags_are_known_too(tmp_path: Path) -> None:
    loaded = converter_for(write_seq2seq(tmp_path, NLLB)).load()
    assert loaded.languages is not None
    reader = LanguageReader(card_of_loaded(loaded))
    codes = {language.code: language for language in loaded.languages.target}
    assert (codes["eng_Latn"].bcp47, codes["zho_Hant"].bcp47, codes["deu_Latn"].bcp47) == ("en", "zh-Hant", "de")
    found = reader.read("en", "ZH-hant")
    assert (found.before, found.forced_bos_id) == ((codes["eng_Latn"].id,), codes["zho_Hant"].id)
    assert len({language.bcp47 for language in codes.values() if language.bcp47}) > 190


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        (
            "en",
            "",
            r"^target_language is missing; model tiny knows .*ace_Latn.* more \(GET /v1/models lists all\): name one$",
        ),
        (
            "en",
            "klingon",
            r"^target_language is 'klingon'; model tiny knows .* and 17\d more \(GET /v1/models lists all\)$",
        ),
        ("en", "zh", r"^target_language is 'zh'; model tiny knows zho_Hans \(zh-Hans\), zho_Hant \(zh-Hant\), ace_"),
        ("x" * 99, "de", r"^source_language is 'x{40}'; model tiny knows "),
        ("", "de", r"^source_language is missing; model tiny knows "),
    ],
)
def test_what_is_wrong_is_said_with_the_list(source: str, target: str, sentence: str, tmp_path: Path) -> None:
    loaded = converter_for(write_seq2seq(tmp_path, NLLB)).load()
    assert loaded.languages is not None
    card = card_of_loaded(loaded)
    card = replace(card, languages=loaded.languages.model_copy(update={"default_source": None}))
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        LanguageReader(card).read(source, target)
    assert len(str(refused.value)) < 1000  # which is where it would be cut off


def test_what_the_checkpoint_says_is_the_default(tmp_path: Path) -> None:
    shape = replace(NLLB, generation={"forced_bos_token_id": 200})
    loaded = converter_for(write_seq2seq(tmp_path, shape)).load()
    assert loaded.languages is not None
    assert loaded.languages.default_source == "eng_Latn"  # its tokenizer_config.json names it
    assert LanguageReader(card_of_loaded(loaded)).read("", "").forced_bos_id == 200


def test_token_ids_need_no_source_language(tmp_path: Path) -> None:
    loaded = converter_for(write_seq2seq(tmp_path, NLLB)).load()
    reader = reader_of(loaded, tmp_path)
    inputs = [pb.Input(token_ids=pb.TokenIds(ids=[9, 10, 2]))]
    (prepared,) = reader.read(pb.TranslateRequest(inputs=inputs, target_language="de"))
    assert prepared.requests[0].source == (9, 10, 2)


def test_the_target_in_the_source(tmp_path: Path) -> None:
    """MADLAD's <2de>, by a field or as the text's own beginning; every part of a split text gets it."""
    folder = write_seq2seq(tmp_path / "checkpoint", MADLAD)
    loaded = converter_for(folder).load()
    reader, original = reader_of(loaded, tmp_path), AutoTokenizer.from_pretrained(folder)
    for code in ("de", "fr", "zh_Hant", "ace"):
        expected = original(f"<2{code}> {TEXT}")["input_ids"]
        (request,) = read(reader, TEXT, target=code)
        assert list(request.source) == expected
        (request,) = read(reader, f"<2{code}> {TEXT}")
        assert list(request.source) == expected
    for parts in (
        read(reader, TEXT, target="fr", split_sentences=True),
        read(reader, f"<2fr> {TEXT}", split_sentences=True),
    ):
        assert len(parts) == 2
        assert {part.source[0] for part in parts} == {original.convert_tokens_to_ids("<2fr>")}
    with pytest.raises(
        InvalidRequest, match=r"^target_language is missing; .*, or begin inputs\[0\]\.text with its token$"
    ):
        read(reader, TEXT)
    with pytest.raises(InvalidRequest, match="has no choice of languages"):
        read(reader, TEXT, source="en", target="fr")


def test_a_marian_with_several_target_languages(tmp_path: Path) -> None:
    codes = (">>deu<<", ">>fra<<", ">>cmn_Hans<<")
    folder = write_marian_directory(tmp_path / "marian", language_codes=codes)
    loaded = MarianConverter(folder).load()
    assert loaded.target_languages == ("cmn_Hans", "deu", "fra")
    reader, original = reader_of(loaded, tmp_path), AutoTokenizer.from_pretrained(folder)
    for name, code in (("deu", codes[0]), ("de", codes[0]), ("fr", codes[1]), ("cmn-hans", codes[2])):
        (request,) = read(reader, TEXT, target=name)
        assert list(request.source) == original(f"{code} {TEXT}")["input_ids"]
    (request,) = read(reader, f">>fra<< {TEXT}")
    assert list(request.source) == original(f">>fra<< {TEXT}")["input_ids"]


# -- a served model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> ConvertedSeq2Seq:
    return convert_seq2seq(NLLB, tmp_path_factory.mktemp("nllb"))


def check_languages(nllb: ConvertedSeq2Seq, every: int) -> None:
    """Translate with each language, Score and the stream agree with it."""
    original, tokenizer = nllb.original, AutoTokenizer.from_pretrained(nllb.source)
    assert nllb.manifest.languages is not None
    languages = nllb.manifest.languages.target[::every]
    with beamline.load(nllb.folder) as model:
        for number, language in enumerate(languages):
            source = languages[-number]
            tokenizer.src_lang = source.code
            given = tokenizer("the value", return_tensors="pt")
            found = original.generate(**given, forced_bos_token_id=language.id, max_length=9, num_beams=2)
            named: Any = {"source_language": source.code, "target_language": language.bcp47 or language.code}
            answer = model.translate("the value", beam_size=2, max_length=9, return_tokens=True, **named)
            mine = [token.id for token in answer.hypotheses[0].tokens]
            assert mine == found[0, 1 : 1 + len(mine)].tolist(), language.code
            assert answer.text == tokenizer.decode(found[0], skip_special_tokens=True)


def test_languages_reach_the_answers(nllb: ConvertedSeq2Seq) -> None:
    check_languages(nllb, every=29)


@pytest.mark.full
def test_every_language_reaches_the_answers(nllb: ConvertedSeq2Seq) -> None:
    check_languages(nllb, every=1)


def test_score_and_stream_take_languages(nllb: ConvertedSeq2Seq) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nllb.source)
    tokenizer.src_lang, tokenizer.tgt_lang = "fra_Latn", "deu_Latn"
    given = tokenizer("the value", text_target="a line of text", return_tensors="pt")
    german = tokenizer.convert_tokens_to_ids("deu_Latn")
    assert given["labels"][0, 0] == german
    with torch.no_grad():
        logits = nllb.original(**given).logits[0].log_softmax(-1)
    expected = logits.gather(1, given["labels"][0][:, None])[1:, 0].sum()  # the language itself is no part of the text
    named: Any = {"source_language": "fr", "target_language": "de"}
    with beamline.load(nllb.folder) as model:
        scored = model.score("a line of text", source="the value", **named)
        assert scored.log_prob == pytest.approx(float(expected), abs=1e-3)
        whole = model.translate("the value", max_length=20, **named).text
        pieces = [piece.text for piece in model.translate_stream("the value", max_length=20, **named)]
        assert "".join(pieces) == whole
        with pytest.raises(ClientError, match=r"target_language is 'xx'; model nllb knows .*ace_Arab"):
            model.score("a", source="b", source_language="fr", target_language="xx")
