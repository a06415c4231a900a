"""Encoder-decoders of Hugging Face: mapped exactly, and served with the very tokens of `generate`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from beamline.converters.families import converter_for
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.contract.manifest import Manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import FinishReason, Hypothesis
from beamline.serving.errors import ConversionError
from beamline.serving.text.tokenizer import TextTokenizer
from tests.converters.modules.test_transformer_steps import check_random_trees
from tests.converters.test_unsupported import edit, reasons_of
from tests.serving.engine.test_scoring import scored
from tests.serving.engine.test_search_exact import compare
from tests.support.compiled import compile_lowered, compile_version
from tests.support.encoder_decoder_pairs import BERT2GPT2, PAIRS
from tests.support.engines import decode, make_engine, results
from tests.support.fairseq import FAIRSEQ
from tests.support.few_bits import write_int8
from tests.support.hugging_face import seq2seq_answers
from tests.support.opennmt import OPENNMT
from tests.support.seq2seq import (
    BART,
    NLLB,
    POSITIONS,
    SHAPES,
    T5,
    ConvertedSeq2Seq,
    Seq2SeqShape,
    convert_seq2seq,
    write_seq2seq,
)
from tests.support.text import english_lines, odd_lines

UMT5 = next(shape for shape in SHAPES if shape.name == "umt5")
SAMPLE = (NLLB, T5)
ALL = (*SHAPES, *PAIRS, *FAIRSEQ, OPENNMT)
_converted: dict[str, ConvertedSeq2Seq] = {}


@pytest.fixture
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConvertedSeq2Seq:
    """The shape that a test is parametrized with, once per process."""
    shape = cast(Seq2SeqShape, request.param)
    if shape.name not in _converted:
        _converted[shape.name] = convert_seq2seq(shape, tmp_path_factory.mktemp(shape.name))
    return _converted[shape.name]


def shapes(chosen: tuple[Seq2SeqShape, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("converted", chosen, indirect=True, ids=lambda shape: shape.name)


# -- without an export -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.name)
@torch.no_grad()
def test_every_shape_is_mapped_exactly(shape: Seq2SeqShape, tmp_path: Path) -> None:
    """As it lies on disk: weights up to the last position, and the text of its tokenizer."""
    original = shape.original()
    loaded = converter_for(write_seq2seq(tmp_path, shape)).load()
    vocabulary = loaded.vocabulary
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(60)[None, :] < torch.tensor([60, 1, 33])[:, None]
    source = torch.randint(4, vocabulary.source_size, mask.shape, generator=generator)
    source = torch.where(mask, source, vocabulary.pad_id)
    target = torch.randint(4, vocabulary.target_size, (3, POSITIONS), generator=generator)
    target[:, 0] = vocabulary.start_id
    model = cast(EncoderDecoderSteps, loaded.model).model
    found = model(source, mask, target).log_softmax(-1)
    inputs = {"input_ids": source, "attention_mask": mask.long(), "decoder_input_ids": target}
    expected = original(**inputs, use_cache=False).logits.log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(loaded.original(source, mask, target).log_softmax(-1), expected, rtol=0, atol=1e-3)
    assert loaded.limits.max_target_length == POSITIONS

    loaded.source_tokenizer.save(tmp_path / "served.json")
    served = TextTokenizer.load(tmp_path / "served.json")
    for line in [*english_lines()[::150], *odd_lines(400)]:
        ids = loaded.source_tokenizer.encode(line)
        assert served.encode(line) == ids, ascii(line)
        assert served.decode(ids) == loaded.source_tokenizer.decode(ids), ascii(line)


@pytest.mark.parametrize("shape", [T5, UMT5, NLLB, BART, BERT2GPT2], ids=lambda shape: shape.name)
def test_steps_over_random_trees_are_teacher_forcing(shape: Seq2SeqShape, tmp_path: Path) -> None:
    """Relative positions are counted along a beam's own path."""
    loaded = converter_for(write_seq2seq(tmp_path, shape)).load()
    check_random_trees(cast(EncoderDecoderSteps, loaded.model).model, tolerance=1e-3)


@pytest.mark.parametrize("how", ["shards", "pytorch_model.bin"])
@torch.no_grad()
def test_weights_in_every_wrapping(tmp_path: Path, how: str) -> None:
    folder = write_seq2seq(tmp_path / "t5", T5)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if how == "shards":
        T5.original().save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    loaded = converter_for(folder).load()
    source = torch.arange(4, 12)[None]
    inputs = (source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[0, 5, 6]]))
    expected = T5.original()(input_ids=source, decoder_input_ids=inputs[2]).logits
    torch.testing.assert_close(loaded.original(*inputs), expected)


def test_what_a_checkpoint_says_of_decoding(tmp_path: Path) -> None:
    loaded = converter_for(write_seq2seq(tmp_path, BART)).load()
    assert (loaded.defaults.forced_bos_id, loaded.defaults.beam_size) == (0, 4)
    assert loaded.defaults.max_length == POSITIONS
    assert (loaded.vocabulary.decoder_start_id, loaded.vocabulary.eos_ids) == (2, (2,))


def test_older_checkpoints_say_it_in_their_config(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, BART)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", num_beams=3, no_repeat_ngram_size=3, length_penalty=2.0, min_length=12, max_length=99)
    defaults = converter_for(folder).load().defaults
    assert (defaults.beam_size, defaults.no_repeat_ngram_size, defaults.length_penalty) == (3, 3, 2.0)
    assert (defaults.min_length, defaults.max_length) == (12, 99)


def test_every_reason_is_said(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, BART)
    edit(folder / "config.json", architectures=["BartForSequenceClassification"], activation_function="tanh")
    architecture, activation = reasons_of(folder)
    assert architecture == "its architecture is BartForSequenceClassification, which is no encoder-decoder that writes"
    assert activation.startswith("activation_function is 'tanh'; supported: ")


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, T5)
    edit(folder / "config.json", num_decoder_layers=3)
    assert "decoder.block.2.layer.1.EncDecAttention.k.weight is missing" in reasons_of(folder)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    folder = write_seq2seq(tmp_path, T5)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConversionError, match="can't be read"):
        converter_for(folder).load()


# -- through the exported graphs and the engine ----------------------------------------------------------------------


def some_sources(manifest: Manifest, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    words = range(4, manifest.vocabulary.source_size)
    return [[chance.choice(words) for _ in range(length)] for length in lengths]


def theirs_to_ours(options: dict[str, Any]) -> dict[str, Any]:
    names = {"forced_bos_token_id": "forced_bos_id", "forced_eos_token_id": "forced_eos_id"}
    return {names.get(name, name): value for name, value in options.items()}


def language_options(model: ConvertedSeq2Seq, number: int) -> dict[str, Any]:
    """As a request in one of the target languages has them; of models that have none, what their checkpoint says."""
    languages, defaults = model.manifest.languages, model.manifest.defaults
    forced = {"forced_bos_token_id": defaults.forced_bos_id, "forced_eos_token_id": defaults.forced_eos_id}
    if languages is not None and languages.target_place == "forced":
        forced["forced_bos_token_id"] = languages.target[number % len(languages.target)].id
    return {name: index for name, index in forced.items() if index is not None}


def start_of(model: ConvertedSeq2Seq, number: int) -> int:
    """The language, where a model begins with that."""
    languages = model.manifest.languages
    if languages is None or languages.target_place != "start":
        return model.manifest.vocabulary.start_id
    return languages.target[number % len(languages.target)].id


def check(model: ConvertedSeq2Seq, beams: int, lengths: tuple[int, ...], stagger: int, **given: Any) -> None:
    """One request for each length, all in one batch, against `generate` one by one."""
    sources = some_sources(model.manifest, lengths, seed=beams)
    settings = [{"max_length": 60, **given, **language_options(model, number)} for number in range(len(sources))]
    starts = [start_of(model, number) for number in range(len(sources))]
    options = [
        DecodingOptions(**{"beam_size": beams, "num_hypotheses": beams, "start_id": start, **theirs_to_ours(each)})
        for start, each in zip(starts, settings, strict=True)
    ]
    engine = make_engine(model.folder, model.manifest)
    answers = results(decode(engine, list(zip(sources, options, strict=True)), stagger))
    for number, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        (expected,) = seq2seq_answers(model, [source], settings[number], beams, (starts[number],))
        assert len(answer.hypotheses) == len(expected)
        for rank, (mine, theirs) in enumerate(zip(answer.hypotheses, expected, strict=True)):
            compare(mine, theirs, f"{model.shape.name}, beam {beams}, source of {len(source)}, rank {rank}")


@shapes(SAMPLE)
def test_the_tokens_of_generate(converted: ConvertedSeq2Seq) -> None:
    for beams in (1, 4):
        check(converted, beams, (1, 17, 40), stagger=3)


@shapes(SAMPLE)
def test_outputs_vary_and_end_by_themselves(converted: ConvertedSeq2Seq) -> None:
    """The model must be worth comparing on."""
    sources = some_sources(converted.manifest, (20,) * 12, seed=9)
    forced = theirs_to_ours(language_options(converted, 5))
    options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=60, **forced)
    engine = make_engine(converted.folder, converted.manifest)
    found = [each.hypotheses[0] for each in results(decode(engine, [(source, options) for source in sources]))]
    assert len({hypothesis.tokens for hypothesis in found}) >= 10
    assert any(hypothesis.finish_reason is FinishReason.EOS and len(hypothesis.tokens) > 4 for hypothesis in found)
    assert len({token for hypothesis in found for token in hypothesis.tokens}) > 20


@shapes(SAMPLE)
def test_score(converted: ConvertedSeq2Seq) -> None:
    check_scores(converted)


@pytest.mark.full
@shapes(ALL)
def test_score_of_every_shape(converted: ConvertedSeq2Seq) -> None:
    check_scores(converted)


@torch.no_grad()
def check_scores(converted: ConvertedSeq2Seq) -> None:
    manifest = converted.manifest
    sources, targets = some_sources(manifest, (5, 30, 1), 1), some_sources(manifest, (7, 50, 3), 2)
    start = manifest.vocabulary.start_id
    asked = [
        (tuple(source), (start, *labels[:-1]), tuple(labels)) for source, labels in zip(sources, targets, strict=True)
    ]
    found = scored(make_engine(converted.folder, manifest), list(asked))
    for (source, target, labels), values in zip(asked, found, strict=True):
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
        logits = converted.original(**inputs, use_cache=False).logits
        expected = logits[0].log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-3)


def certificate(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / "parity.json").read_text()))


@pytest.mark.full
@pytest.mark.timeout(1800)
@shapes(ALL)
def test_whole_grid(converted: ConvertedSeq2Seq, tmp_path: Path) -> None:
    """Every shape: all widths, alone and in a crowd of others, up to the limits of source and target."""
    for beams in (1, 2, 4, 8):
        check(converted, beams, (1, 2, 9, 33, 60, POSITIONS), stagger=2)
        check(converted, beams, (21,), stagger=0)
    check(converted, 4, (12, POSITIONS), stagger=0, max_length=POSITIONS, min_length=210)
    check(converted, 4, (12, 30), stagger=0, no_repeat_ngram_size=2, repetition_penalty=1.3, length_penalty=0.6)
    parity = certificate(converted.folder)
    assert (parity["beam_exact_share"], parity["text_exact_share"]) == (1.0, 1.0)
    assert parity["max_log_prob_difference"] <= 1e-3


@pytest.mark.full
@pytest.mark.timeout(900)
@shapes(tuple(shape.calm() for shape in ALL))
def test_every_shape_in_8_bits(converted: ConvertedSeq2Seq, tmp_path: Path) -> None:
    """Most words of real text stay, and nearly all of those of which float32 is sure: less would have been refused."""
    agreement = write_int8(converted.folder, tmp_path / "int8")
    assert agreement.lines >= 20
    assert agreement.words >= 30
    assert agreement.share >= 0.8
    assert check_served(tmp_path / "int8")


def check_served(version: Path) -> list[Hypothesis]:
    from beamline.serving.contract.manifest import read_manifest

    manifest = read_manifest(version)
    options = DecodingOptions(beam_size=4, num_hypotheses=1, max_length=40)
    requests = [(source, options) for source in some_sources(manifest, (5, 20, 40), 3)]
    together = [each.hypotheses[0] for each in results(decode(make_engine(version, manifest), requests))]
    for request, found in zip(requests, together, strict=True):
        (alone,) = results(decode(make_engine(version, manifest), [request]))
        assert alone.hypotheses[0].tokens == found.tokens
    return together


@pytest.mark.full
@pytest.mark.timeout(1800)
@shapes(ALL)
def test_every_shape_compiles(converted: ConvertedSeq2Seq) -> None:
    assert set(compile_version(converted.folder)) == {"encoder", "step", "score"}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
@shapes(tuple(shape.calm() for shape in (*SAMPLE, BERT2GPT2)))
def test_families_compile_in_every_precision(converted: ConvertedSeq2Seq, precision: str, tmp_path: Path) -> None:
    assert set(compile_lowered(converted.folder, tmp_path / "lowered", precision)) == {"encoder", "step", "score"}
