"""fairseq's checkpoints: layouts of all times, its dictionaries, tokens of languages, and what is refused. The weights
are compared with those of Hugging Face's twins in `test_seq2seq.py`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from beamline.converters.families import any_converter_for, converter_for
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.errors import ConversionError
from beamline.serving.text.tokenizer import TextTokenizer
from tests.converters.test_unsupported import reasons_of
from tests.support.fairseq import LANGUAGES, LEARNED, MULTILINGUAL, WMT19, FairseqShape, dictionary
from tests.support.seq2seq import pieces


def written(folder: Path, shape: FairseqShape) -> Path:
    shape.write(folder)
    return folder


def test_words_are_those_of_its_dictionaries(tmp_path: Path) -> None:
    loaded = converter_for(written(tmp_path, WMT19)).load()
    line = "Save the file before you close it."
    for tokenizer, skipped in ((loaded.source_tokenizer, 7), (loaded.target_tokenizer, 11)):
        names = ["<s>", "<pad>", "</s>", "<unk>", *dictionary(skipped)]
        ids = tokenizer.encode(line)
        assert ids[-1] == 2
        assert "".join(names[index] for index in ids[:-1]).replace("\u2581", " ").strip().count(" ") == line.count(" ")
        missing = pieces()[skipped][0]
        assert missing not in names
    assert loaded.source_tokenizer.encode(line) != loaded.target_tokenizer.encode(line)
    assert (loaded.source_languages, loaded.target_languages) == (("en",), ("de",))
    assert loaded.defaults.bad_words == ((1,),)  # its own search never writes padding


def test_languages_stand_behind_the_words(tmp_path: Path) -> None:
    loaded = converter_for(written(tmp_path, MULTILINGUAL)).load()
    languages = loaded.languages
    assert languages is not None
    first = 4 + len(dictionary(7))
    assert [(each.code, each.id) for each in languages.target] == [
        (code, first + number) for number, code in enumerate(LANGUAGES)
    ]
    assert (languages.source_place, languages.target_place) == ("before", "forced")
    assert loaded.vocabulary.target_size == first + len(LANGUAGES)
    ids = loaded.target_tokenizer.encode("Save it.")
    assert loaded.target_tokenizer.decode([languages.target[0].id, *ids]) == "Save it."


def test_a_target_that_the_source_names(tmp_path: Path) -> None:
    said = {**MULTILINGUAL.said, "encoder_langtok": "tgt", "decoder_langtok": False, "langs": None}
    none = {"source_lang": None, "target_lang": None}  # as such a training says: all dictionaries are one
    shape = replace(MULTILINGUAL, said={**said, **none, "lang_pairs": "en-de,en-fr"})
    languages = converter_for(written(tmp_path, shape)).load().languages
    assert languages is not None
    assert (languages.source, languages.target_place) == ((), "source")
    assert [each.code for each in languages.target] == list(LANGUAGES)


def test_text_that_is_cut_elsewhere(tmp_path: Path) -> None:
    """Moses and fastBPE are no part of a server: what they made is words, and spaces between them."""
    folder = written(tmp_path / "cut", WMT19)
    (folder / "spm.model").unlink()
    (reason,) = reasons_of(folder)
    assert reason.startswith("what cuts its source into words is not known: put the sentencepiece model")
    config = tmp_path / "parts.json"
    config.write_text(json.dumps({"family": "fairseq", "tokenizer": "spaces", "decoding": {"beam_size": 5}}))
    loaded = converter_for(folder, config).load()
    assert loaded.defaults.beam_size == 5
    words = dictionary(7)[20:26]
    text = " ".join([*words, "nowhere", "a</s>b"])
    expected = [*range(24, 30), 3, 3, 2]
    loaded.source_tokenizer.save(tmp_path / "served.json")
    served = TextTokenizer.load(tmp_path / "served.json")
    for tokenizer in (loaded.source_tokenizer, served):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == " ".join(words)


def test_two_sentencepiece_models_are_told_by_their_names(tmp_path: Path) -> None:
    folder = written(tmp_path, WMT19)
    (folder / "spm.model").rename(folder / "spm.en.model")
    (folder / "spm.de.model").write_bytes((folder / "spm.en.model").read_bytes())
    assert converter_for(folder).load().source_tokenizer.encode("Save it.")
    (folder / "spm.de.model").rename(folder / "spm.fr.model")
    assert reasons_of(folder)[0].startswith("what cuts its target into words is not known")


def test_a_sentencepiece_model_of_other_words(tmp_path: Path) -> None:
    folder = written(tmp_path, LEARNED)
    for language in ("en", "de"):
        file = folder / f"dict.{language}.txt"
        file.write_text("".join(f"word{number} 1\n" for number, _ in enumerate(file.read_text().splitlines())))
    (reason,) = reasons_of(folder)
    assert reason.endswith("words are its pieces: it is not the model that the text was cut with")


def change(folder: Path, **options: Any) -> None:
    content = torch.load(folder / "checkpoint_best.pt", weights_only=False)
    for name, value in options.items():
        setattr(content["args"], name, value)
    torch.save(content, folder / "checkpoint_best.pt")


def test_every_reason_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path, WMT19)
    change(folder, adaptive_softmax_cutoff=[10], activation_fn="tanh", task="speech_to_text", decoder_output_dim=16)
    softmax, task, activation, width = reasons_of(folder)
    assert softmax == "adaptive_softmax_cutoff is [10], which is not supported"
    assert task == "its task is 'speech_to_text'; supported: translation, translation_multi_simple_epoch"
    assert activation.startswith("activation_fn is 'tanh'; supported: relu, ")
    assert width == "decoder_output_dim is 16, but encoder_embed_dim is 32; they must be equal"


def test_dictionaries_that_do_not_fit(tmp_path: Path) -> None:
    folder = written(tmp_path, WMT19)
    words = (folder / "dict.de.txt").read_text()
    (folder / "dict.de.txt").write_text(words + "more 1\n")
    (reason,) = reasons_of(folder)
    assert reason.startswith("decoder.embed_tokens.weight has ")
    (folder / "dict.de.txt").write_text(words.replace("\n", "\nnothing\n", 1))
    assert reasons_of(folder) == ["dict.de.txt, line 2: no word with its count: 'nothing'"]
    (folder / "dict.de.txt").unlink()
    with pytest.raises(ConversionError, match=r"dict\.de\.txt is missing: the target's dictionary"):
        converter_for(folder).load()


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, WMT19)
    change(folder, encoder_layers=1, decoder_ffn_embed_dim=60)
    reasons = reasons_of(folder)
    assert "encoder.1.attention.qkv.weight is not a part of this architecture" in reasons
    assert "decoder.0.feed_forward.inner.weight has shape [64, 32], but its configuration says [60, 32]" in reasons


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


def test_no_code_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, WMT19)
    content = {**WMT19.checkpoint(), "task_state": Evil()}
    torch.save(content, folder / "checkpoint_best.pt", pickle_module=pickle)
    with pytest.raises(ConversionError, match="can't be read: it holds print, and no code of a checkpoint"):
        converter_for(folder).load()
    assert "ran" not in capsys.readouterr().out


def test_which_checkpoint(tmp_path: Path) -> None:
    folder = written(tmp_path, LEARNED)
    (folder / "checkpoint_best.pt").rename(folder / "checkpoint_last.pt")
    (folder / "checkpoint1.pt").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"must have one checkpoint .*checkpoint1.pt, checkpoint_last.pt; of sev"):
        converter_for(folder).load()
    config = tmp_path / "parts.json"
    config.write_text(json.dumps({"family": "fairseq", "weights": "checkpoint_last.pt", "max_positions": 100}))
    loaded = converter_for(folder, config).load()
    assert loaded.limits.max_target_length == loaded.limits.max_source_length == 100
    model = cast(EncoderDecoderSteps, loaded.model).model
    target = torch.randint(4, 100, (1, 100), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(target, dtype=torch.bool)
    torch.testing.assert_close(model(target, mask, target), loaded.original(target, mask, target), atol=1e-3, rtol=0)
    with pytest.raises(ConversionError, match="convert the folder that it lies in"):
        any_converter_for(folder / "checkpoint_last.pt")
