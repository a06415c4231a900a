"""What can't be converted is said in sentences, all of them at once, and no code of a checkpoint ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beamline.converters.families import converter_for
from beamline.serving.errors import ConversionError, UnsupportedCheckpoint
from tests.support.checkpoints import TorchShape, torch_model, write_reference, write_torch_transformer


def edit(path: Path, **changes: Any) -> None:
    """Changes a JSON file; None takes a key out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reasons_of(folder: Path) -> list[str]:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter_for(folder).load()
    lines = str(caught.value).splitlines()[1:]
    assert lines == [f"  - {reason}" for reason in caught.value.reasons]
    return caught.value.reasons


@pytest.fixture
def marian(marian_directory: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(marian_directory, tmp_path / "marian"))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return write_torch_transformer(tmp_path / "theirs", torch_model(TorchShape()))


# -- Marian ----------------------------------------------------------------------------------------------------------


def test_marian_says_every_reason(marian: Path) -> None:
    edit(
        marian / "config.json",
        decoder_attention_heads=2,
        decoder_ffn_dim=8,
        activation_function="tanh",
        normalize_before=True,
        static_position_embeddings=False,
        d_model=None,
    )
    (marian / "source.spm").unlink()
    (marian / "vocab.json").unlink()
    assert reasons_of(marian) == [
        "config.json: d_model is missing",
        "encoder_attention_heads is 4 and decoder_attention_heads is 2; they must be equal",
        "encoder_ffn_dim is 64 and decoder_ffn_dim is 8; they must be equal",
        "activation_function is 'tanh'; supported: swish, silu, relu, gelu",
        "normalize_before is set",
        "static_position_embeddings is off: learned positions are not Marian's",
        "source.spm is missing",
        "vocab.json is missing",
    ]


def test_marian_names_every_tensor_that_does_not_fit(marian: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["model.encoder.layers.0.self_attn.q_proj.weight"]
        del weights["model.decoder.layers.1.fc1.bias"]
        weights["model.encoder.layers.1.fc2.bias"] = torch.zeros(5)
        weights["model.encoder.layers.0.adapter.weight"] = torch.zeros(2, 2)
        weights["extra"] = torch.zeros(1)

    edit_weights(marian, spoil)
    assert set(reasons_of(marian)) == {
        "encoder.0.attention.qkv.weight is missing",
        "decoder.1.feed_forward.inner.bias is missing",
        "encoder.1.feed_forward.outer.bias has shape [5], but its configuration says [32]",
        "model.encoder.layers.0.adapter.weight is not a part of this architecture",
        "extra is not a part of this architecture",
    }


def test_marian_without_embeddings(marian: Path) -> None:
    names = ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    edit_weights(marian, lambda weights: [weights.pop(name, None) for name in names])
    assert reasons_of(marian) == ["model.encoder.embed_tokens.weight or model.shared.weight is missing"]


def test_marian_of_another_depth(marian: Path) -> None:
    edit(marian / "config.json", encoder_layers=1, decoder_layers=3)
    reasons = reasons_of(marian)
    assert "decoder.2.cross_attention.key_value.weight is missing" in reasons
    assert "encoder.1.feed_forward.inner.weight is not a part of this architecture" in reasons


def test_marian_generation_settings_that_we_lack(marian: Path) -> None:
    edit(marian / "generation_config.json", do_sample=True, num_beams=2)
    assert reasons_of(marian) == [
        "generation settings do_sample and num_beams 2: beams that are drawn are not supported"
    ]
    edit(marian / "generation_config.json", num_beams=1, typical_p=0.5, num_beam_groups=2, forced_bos_token_id=[1, 2])
    assert reasons_of(marian) == [
        "generation setting num_beam_groups is 2, which is not supported",
        "generation setting typical_p is 0.5, which is not supported",
        "generation setting forced_bos_token_id has 2 ids; one is supported",
    ]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "vocab.json"])
def test_a_broken_json_file_is_named(marian: Path, name: str) -> None:
    (marian / name).write_text("{")
    with pytest.raises(ConversionError, match=f"{name} is not JSON"):
        converter_for(marian).load()


def test_a_broken_sentencepiece_model_is_named(marian: Path) -> None:
    (marian / "target.spm").write_bytes(b"no model")
    with pytest.raises(ConversionError, match=r"target\.spm can't be converted"):
        converter_for(marian).load()


# -- torch.nn.Transformer --------------------------------------------------------------------------------------------


def test_names_that_the_weights_lack(theirs: Path) -> None:
    edit(theirs / "config.json", source_embedding="a", output="b", output_bias="c", transformer="d")
    assert reasons_of(theirs) == [
        "config.json: source_embedding is 'a', which the weights don't have",
        "config.json: output is 'b', which the weights don't have",
        "config.json: output_bias is 'c', which the weights don't have",
        "config.json: there is no nn.Transformer at 'd'",
    ]


def test_a_config_that_is_not_understood(theirs: Path) -> None:
    edit(theirs / "config.json", heads="many", eos_id=None, layers=3)
    reasons = reasons_of(theirs)
    assert [reason.partition(":")[0] for reason in reasons] == ["eos_id", "heads", "layers"]


def test_a_config_that_can_not_be_built(theirs: Path) -> None:
    edit(theirs / "config.json", heads=3, activation="tanh", positions="rotary", pad_id=10**6)
    assert [reason.split()[0] for reason in reasons_of(theirs)] == ["d_model", "positions", "activation", "pad_id"]
    edit(theirs / "config.json", heads=0, max_positions=1)
    reasons = reasons_of(theirs)
    assert "heads is 0; it must be at least 1" in reasons
    assert "max_positions is 1; a start and an end need 2" in reasons


def test_tensors_that_have_no_place(theirs: Path) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["net.decoder.layers.0.norm3.weight"]
        weights["net.encoder.layers.0.adapter.weight"] = torch.zeros(2)
        weights["head.weight"] = torch.zeros(2)
        weights["net.decoder.norm.bias"] = torch.zeros(3)

    edit_weights(theirs, spoil)
    assert set(reasons_of(theirs)) == {
        "decoder.0.feed_forward_norm.weight is missing",
        "encoder.layers.0.adapter.weight is not a part of this architecture",
        "head.weight is not a part of this architecture",
        "decoder_norm.bias has shape [3], but its configuration says [16]",
    }


def test_a_tokenizer_that_is_not_there(theirs: Path) -> None:
    edit(theirs / "config.json", tokenizer="other.model")
    with pytest.raises(ConversionError, match=r"other\.model is missing: a tokenizer.json or a sentencepiece model"):
        converter_for(theirs).load()


# -- ours ------------------------------------------------------------------------------------------------------------


def test_a_reference_config_says_every_reason(tmp_path: Path) -> None:
    folder = write_reference(tmp_path)
    edit(folder / "config.json", colour="red", size=3, norm="middle", activation="tanh", heads=3)
    assert reasons_of(folder) == [
        "config.json: 'colour' is not known",
        "config.json: 'size' is not known",
        "config.json: d_model 16 is not a multiple of heads 3",
        "config.json: norm is 'middle'; allowed: 'pre', 'post'",
        "config.json: activation is 'tanh'; allowed: 'relu', 'gelu', 'silu'",
    ]


def test_a_reference_config_that_lacks_something(tmp_path: Path) -> None:
    folder = write_reference(tmp_path)
    edit(folder / "config.json", ffn=None, colour="red")
    unknown, missing = reasons_of(folder)
    assert unknown == "config.json: 'colour' is not known"
    assert missing == "config.json: ffn: Field required"


def test_reference_tensors_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_reference(tmp_path)

    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["encoder.0.attention.qkv.weight"]
        weights["encoder.0.feed_forward.inner.bias"] = torch.zeros(3)
        weights["extra"] = torch.zeros(2)

    edit_weights(folder, spoil)
    assert reasons_of(folder) == [
        "encoder.0.attention.qkv.weight is missing",
        "extra is not a part of this architecture",
        "encoder.0.feed_forward.inner.bias has shape [3], but its configuration says [24]",
    ]


# -- weights ---------------------------------------------------------------------------------------------------------


class Trap:
    """A pickle of it makes a folder when it is read by someone who trusts it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("modern", [True, False], ids=["torch", "plain pickle"])
def test_a_pickle_with_code_is_refused_and_never_run(marian: Path, tmp_path: Path, modern: bool) -> None:
    sprung = tmp_path / "sprung"
    content = {**load_file(marian / "model.safetensors"), "trap": Trap(sprung)}
    (marian / "model.safetensors").unlink()
    if modern:
        torch.save(content, marian / "pytorch_model.bin")
    else:
        (marian / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin can't be read as weights"):
        converter_for(marian).load()
    assert not sprung.exists()
    if modern:  # the trap is a real one
        torch.load(marian / "pytorch_model.bin", weights_only=False)
        assert sprung.exists()


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {"a": torch.zeros(1)}}, {"step": 3}])
def test_a_pickle_of_something_else_is_refused(marian: Path, content: object) -> None:
    (marian / "model.safetensors").unlink()
    torch.save(content, marian / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="it must hold tensors by their names"):
        converter_for(marian).load()


def test_weights_that_are_cut_or_missing_are_named(marian: Path) -> None:
    content = (marian / "model.safetensors").read_bytes()
    (marian / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConversionError, match=r"model\.safetensors can't be read as weights"):
        converter_for(marian).load()
    (marian / "model.safetensors").unlink()
    with pytest.raises(
        ConversionError, match=r"has no weights: expected one of model\.safetensors, pytorch_model\.bin"
    ):
        converter_for(marian).load()
