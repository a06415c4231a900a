"""OpenNMT-py's checkpoints: what its options and weights are, what stands around a text, and what is refused. Answers
are compared with `generate` in `test_seq2seq.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from beamline.converters.families import converter_for
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.serving.errors import ConversionError
from tests.converters.test_unsupported import reasons_of
from tests.support.opennmt import OPENNMT, VARIANTS, NMTModel, Variant, options, words

FILE = "model_step_7.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    OPENNMT.write(tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    content = torch.load(folder / FILE, weights_only=False) | changes
    torch.save({name: value for name, value in content.items() if value is not None}, folder / FILE)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@torch.no_grad()
def test_its_own_modules(variant: Variant, tmp_path: Path) -> None:
    opt = options(**variant.changed)
    theirs = NMTModel(opt, seed=3).eval()
    theirs.save(tmp_path, opt)
    loaded = converter_for(tmp_path).load()
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(30)[None, :] < torch.tensor([30, 4])[:, None]
    source = torch.where(mask, torch.randint(4, len(words()), mask.shape, generator=generator), 1)
    target = torch.randint(0, len(words()), (2, 50), generator=generator)
    expected = theirs(source, mask, target).log_softmax(-1)
    model = cast(EncoderDecoderSteps, loaded.model).model
    for found in (model(source, mask, target), loaded.original(source, mask, target)):
        torch.testing.assert_close(found.log_softmax(-1), expected, rtol=0, atol=1e-3)


def test_nothing_stands_around_a_source(folder: Path) -> None:
    loaded = converter_for(folder).load()
    ids = loaded.source_tokenizer.encode("Save it.")
    assert "".join(words()[index] for index in ids).replace("\u2581", " ").strip() == "Save it."
    assert loaded.target_tokenizer.decode([2, *ids, 3]) == "Save it."
    vocabulary = loaded.vocabulary
    assert (vocabulary.pad_id, vocabulary.decoder_start_id, vocabulary.eos_ids) == (1, 2, (3,))
    (folder / "config.json").unlink()  # found without it, too
    assert converter_for(folder).load().limits.max_target_length == 1024


def test_weights_beside_the_pickle(folder: Path) -> None:
    """As with `save_format: safetensors`."""
    content = torch.load(folder / FILE, weights_only=False)
    generator = {f"generator.{name}": each.clone() for name, each in content["generator"].items()}
    weights = {name: each.clone() for name, each in content["model"].items()} | generator
    save_file(weights, folder / "model_step_7.safetensors")
    expected = cast(EncoderDecoderSteps, converter_for(folder).load().model).model.state_dict()
    edit(folder, model=None, generator=None)
    found = cast(EncoderDecoderSteps, converter_for(folder).load().model).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_reason_is_said(folder: Path) -> None:
    edit(folder, opt=options(max_relative_positions=20, copy_attn=True, encoder_type="brnn", dec_hid_size=64))
    encoder, relative, copies, widths = reasons_of(folder)
    assert encoder == "encoder_type is 'brnn'; supported: 'transformer'"
    assert relative == "max_relative_positions is 20; supported: 0"
    assert copies == "copy_attn is True; supported: False"
    assert widths.startswith("enc_hid_size 32, dec_hid_size 64")


def test_what_is_no_such_checkpoint(folder: Path) -> None:
    edit(folder, vocab={"src": words(), "tgt": words()[:2]})
    assert reasons_of(folder) == ["vocab 'tgt' has no </s>"]
    edit(folder, vocab={"src": words(), "tgt": words()[:-1]})
    (reason,) = reasons_of(folder)
    assert reason.startswith("decoder.embed_tokens.weight has ")
    torch.save({"state_dict": {}}, folder / FILE)
    (reason,) = reasons_of(folder)
    assert reason.startswith(f"{FILE} has state_dict, not opt and vocab. A folder without config.json is taken for")
    torch.save({"vocab": pytest.raises}, folder / FILE)  # a class of its own, as version 2 has torchtext's
    with pytest.raises(ConversionError, match=r"it holds .*, and no code .*tools/convertv2_v3.py"):
        converter_for(folder).load()
