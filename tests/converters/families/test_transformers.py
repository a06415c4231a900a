"""Checkpoints as their own code runs them, against the module that they are mapped onto: no export."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from beamline.converters.families import converter_for
from beamline.converters.families.marian import MarianConverter
from beamline.converters.families.reference_transformer import ReferenceTransformerConverter
from beamline.converters.families.torch_transformer import TorchTransformerConverter
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.errors import ConversionError
from tests.support.checkpoints import (
    EOS,
    MAX_POSITIONS,
    PAD,
    START,
    TorchShape,
    all_torch_shapes,
    reference_config,
    reference_model,
    torch_model,
    write_reference,
    write_torch_transformer,
)

assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def module_of(loaded: LoadedModel) -> EncoderDecoderTransformer:
    return cast("EncoderDecoderSteps", loaded.model).model


def batch(size: int, pad: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources of different lengths, their mask, and targets."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(8)[None, :] < torch.tensor([8, 1, 5])[:, None]
    source = torch.where(mask, torch.randint(4, size - 1, (3, 8), generator=generator), pad)
    target = torch.randint(4, size - 1, (3, 6), generator=generator)
    target[:, 0] = start
    return source, mask, target


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # nested tensors, which nobody asked for
@pytest.mark.parametrize("shape", list(all_torch_shapes()), ids=lambda shape: shape.name)
@torch.no_grad()
def test_every_torch_transformer_is_mapped_exactly(tmp_path: Path, shape: TorchShape) -> None:
    theirs = torch_model(shape)
    folder = write_torch_transformer(tmp_path, theirs)
    loaded = TorchTransformerConverter(folder, folder / "config.json").load()
    inputs = batch(loaded.vocabulary.source_size, PAD, START)
    expected = theirs(*inputs)
    assert_same(loaded.original(*inputs), expected)
    assert_same(module_of(loaded)(*inputs), expected)
    assert loaded.vocabulary.eos_ids == (EOS,)
    assert loaded.limits.max_source_length == MAX_POSITIONS


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
@torch.no_grad()
def test_a_reference_checkpoint_is_itself(tmp_path: Path, share: bool, tie: bool) -> None:
    folder = write_reference(tmp_path, share_embeddings=share, tie_output=tie, output_bias=share)
    loaded = ReferenceTransformerConverter(folder).load()
    inputs = batch(loaded.vocabulary.source_size, PAD, START)
    expected = reference_model(reference_config(share_embeddings=share, tie_output=tie, output_bias=share))
    torch.testing.assert_close(module_of(loaded)(*inputs), expected(*inputs), rtol=0, atol=0)


def test_a_reference_checkpoint_brings_its_settings(tmp_path: Path) -> None:
    beside = {
        "decoding": {"beam_size": 2, "max_length": 30},
        "source_language": "en",
        "target_language": "de",
        "description": "a test",
    }
    loaded = ReferenceTransformerConverter(write_reference(tmp_path, beside=beside)).load()
    assert (loaded.defaults.beam_size, loaded.defaults.max_length) == (2, 30)
    assert (loaded.source_languages, loaded.target_languages) == (("en",), ("de",))
    assert loaded.description == "a test"


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pytorch_model.bin"])
@torch.no_grad()
def test_marian_is_mapped_exactly(marian_directory: Path, tmp_path: Path, pickled: bool) -> None:
    folder = tmp_path / "marian"
    folder.mkdir()
    for path in marian_directory.iterdir():
        if path.name != "model.safetensors" or not pickled:
            (folder / path.name).symlink_to(path)
    if pickled:
        torch.save(load_file(marian_directory / "model.safetensors"), folder / "pytorch_model.bin")
    loaded = MarianConverter(folder).load()
    vocabulary = loaded.vocabulary
    inputs = batch(vocabulary.source_size, vocabulary.pad_id, vocabulary.start_id)
    assert_same(module_of(loaded)(*inputs), loaded.original(*inputs))
    generation = json.loads((folder / "generation_config.json").read_text())
    assert loaded.defaults.beam_size == generation["num_beams"]
    assert loaded.defaults.max_length == generation["max_length"]
    assert loaded.defaults.bad_words == ((vocabulary.pad_id,),)
    assert loaded.defaults.forced_eos_id == generation["forced_eos_token_id"]


def test_suppressed_tokens_are_a_default_and_no_part_of_the_graph(marian_directory: Path, tmp_path: Path) -> None:
    """A request may replace them; words that are always bad are left out by the graph itself."""
    for path in marian_directory.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    generation = json.loads((marian_directory / "generation_config.json").read_text())
    generation |= {"suppress_tokens": [5, 6], "renormalize_logits": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = MarianConverter(tmp_path).load()
    assert loaded.defaults.suppress_tokens == (5, 6)
    assert loaded.forbidden == (loaded.vocabulary.pad_id,)


def test_families_are_recognised(tmp_path: Path, marian_directory: Path) -> None:
    reference = write_reference(tmp_path / "reference")
    theirs = write_torch_transformer(tmp_path / "theirs", torch_model(TorchShape()))
    assert isinstance(converter_for(reference), ReferenceTransformerConverter)
    assert isinstance(converter_for(theirs), TorchTransformerConverter)
    assert isinstance(converter_for(marian_directory), MarianConverter)
    # The config may lie elsewhere: the checkpoint stays as it was published.
    elsewhere = tmp_path / "parts.json"
    (theirs / "config.json").rename(elsewhere)
    assert isinstance(converter_for(theirs, elsewhere), TorchTransformerConverter)
    assert converter_for(theirs, elsewhere).load().vocabulary.eos_ids == (EOS,)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"config.json can't be read: No such file"),
        ("{", r"config.json is not JSON"),
        ("[]", r"config.json must hold a JSON object"),
        (
            '{"model_type": "bert"}',
            r"model_type or family is 'bert'; known: beamline_transformer, .*torch_rec.*own module, file.py:build",
        ),
        ("{}", r"model_type or family is None; known"),
    ],
    ids=["none", "cut", "list", "bert", "empty"],
)
def test_what_is_not_recognised_is_said(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConversionError, match=sentence):
        converter_for(tmp_path)


def test_a_source_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="file is neither a folder with a checkpoint nor a GGUF file"):
        converter_for(tmp_path / "file")
    with pytest.raises(ConversionError, match=r"nowhere does not exist$"):
        converter_for(tmp_path / "nowhere")
    with pytest.raises(
        ConversionError, match=r"does not exist; .* hf download facebook/x --local-dir x, and convert x$"
    ):
        converter_for(Path("facebook/x"))
    with pytest.raises(ConversionError, match=r"hf download facebook/x --local-dir x, and convert x$"):
        converter_for(Path("https://huggingface.co/facebook/x/tree/main"))
