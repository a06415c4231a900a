"""Recurrent checkpoints, ours and others', against the module that they are mapped onto; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from beamline.converters.families import converter_for
from beamline.converters.families.reference_recurrent import ReferenceRecurrentConverter
from beamline.converters.families.torch_recurrent import TorchRecurrentConverter
from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from beamline.converters.modules.recurrent.steps import RecurrentSteps
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.errors import ConversionError
from tests.converters.test_unsupported import edit, edit_weights, reasons_of
from tests.support.checkpoints import EOS, PAD, START
from tests.support.recurrent import Shape, random_recurrent, text_vocabulary, write_recurrent
from tests.support.recurrent_users import (
    USER_MODELS,
    Additive,
    Cho,
    Luong,
    OpenNmt,
    UserModel,
    user_model,
    write_user_model,
)

assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def module_of(loaded: LoadedModel) -> Recurrent:
    return cast("RecurrentSteps", loaded.model).model


def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(8)[None, :] < torch.tensor([8, 1, 5])[:, None]
    source = torch.where(mask, torch.randint(4, size, (3, 8), generator=generator), PAD)
    target = torch.randint(4, size, (3, 6), generator=generator)
    target[:, 0] = START
    return source, mask, target


# -- others' ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", USER_MODELS, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_a_users_model_is_mapped_exactly(tmp_path: Path, kind: type[UserModel]) -> None:
    theirs = user_model(kind)
    converter = converter_for(write_user_model(tmp_path, theirs))
    assert isinstance(converter, TorchRecurrentConverter)
    loaded = converter.load()
    inputs = batch(loaded.vocabulary.source_size)
    expected = theirs(*inputs)
    assert_same(loaded.original(*inputs), expected)
    assert_same(module_of(loaded)(*inputs), expected)
    assert loaded.vocabulary.eos_ids == (EOS,)


@pytest.mark.parametrize("name", ["mine.npz", "mine.pt", "mine.pth"])
def test_the_only_file_of_weights_is_found(tmp_path: Path, name: str) -> None:
    folder = write_user_model(tmp_path, user_model(Cho))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if name.endswith(".npz"):
        arrays: dict[str, Any] = {key: tensor.numpy() for key, tensor in weights.items()}
        np.savez(folder / name, **arrays)
    else:
        torch.save(weights, folder / name)
    assert converter_for(folder).load().vocabulary.eos_ids == (EOS,)
    (folder / "optimizer.pt").touch()
    with pytest.raises(ConversionError, match=rf'several files of weights; "weights" must name one of {name}, optim'):
        converter_for(folder).load()
    edit(folder / "config.json", weights=name)
    assert converter_for(folder).load().vocabulary.eos_ids == (EOS,)


@torch.no_grad()
def test_local_windows_are_what_the_original_computes(tmp_path: Path) -> None:
    """No tutorial has them; the original is then the only other opinion."""
    for window in ("monotonic", "predictive"):
        folder = write_user_model(tmp_path / window, user_model(Luong), window=window, window_radius=2)
        if window == "predictive":
            extra = {"place.weight": torch.randn(5, 8), "place_v": torch.randn(5)}
            edit_weights(folder, lambda weights, extra=extra: weights.update(extra))  # type: ignore[misc]
            edit(folder / "config.json", attention_place="place", attention_place_energy="place_v")
        loaded = converter_for(folder).load()
        inputs = batch(loaded.vocabulary.source_size)
        assert_same(module_of(loaded)(*inputs), loaded.original(*inputs))


def test_names_that_the_weights_lack(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(Additive))
    edit(folder / "config.json", encoder="a", output="b", attention_energy="c", bridge_hidden=["d"])
    assert reasons_of(folder) == [
        "config.json: output is 'b', which the weights don't have",
        "config.json: there is no nn.RNN, LSTM or GRU at 'a', its encoder",
        "config.json: attention_energy is 'c', which the weights don't have",
        "config.json: bridge_hidden.0 is 'd', which the weights don't have",
    ]


def test_parts_that_do_not_fit_each_other(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(Additive))
    edit(folder / "config.json", bridge_hidden=[], attention="general", window="predictive", window_radius=2)
    assert reasons_of(folder) == [
        "config.json: bridge_hidden names 0 layers; 1 are needed",
        "config.json: attention_key is not used by this attention",
        "config.json: attention_energy is not used by this attention",
        "config.json: attention_place is missing",
        "config.json: attention_place_energy is missing",
        "config.json: attention_query has a bias, which is not supported",
    ]


def test_what_an_nn_lstm_may_not_have(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(OpenNmt))
    edit_weights(folder, lambda weights: weights.update({"encoder.rnn.weight_hr_l0": torch.zeros(4, 4)}))
    edit(folder / "config.json", decoder=["decoder.rnn.layers.0", "decoder.rnn.layers.7"])
    assert reasons_of(folder) == [
        "config.json: there is no nn.RNN, LSTM or GRU at 'decoder.rnn.layers.7', its decoder",
        "encoder.rnn.weight_hr_l0: an nn.LSTM with a projection (proj_size) is not supported",
    ]


def test_an_encoder_and_a_decoder_of_different_cells(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(Cho))

    def lstm(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            if name.startswith("cell."):
                weights[name] = torch.zeros(44, *weights[name].shape[1:])

    edit_weights(folder, lstm)
    assert reasons_of(folder) == ["the encoder is of gru cells and the decoder of lstm"]


def test_tensors_that_have_no_place(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(Additive))

    def spoil(weights: dict[str, Tensor]) -> None:
        weights["extra.weight"] = torch.zeros(2)
        weights["decoder.weight_ih_l0"] = torch.zeros(30, 5)

    edit_weights(folder, spoil)
    assert reasons_of(folder) == [
        "extra.weight is not a part of this architecture",
        "decoder.weight_ih_l0 has shape [30, 5], but its configuration says [30, 21]",
    ]


def test_a_config_that_is_not_understood(tmp_path: Path) -> None:
    folder = write_user_model(tmp_path, user_model(Additive))
    edit(folder / "config.json", decoder_input=["soup"], max_positions="many", colour="red")
    assert [reason.partition(":")[0] for reason in reasons_of(folder)] == ["max_positions", "decoder_input.0", "colour"]


# -- ours ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["tied", "untied", "bare"])
@torch.no_grad()
def test_our_checkpoint_is_itself(tmp_path: Path, head: str) -> None:
    model = random_recurrent(Shape("peepholes", "general", "concat", 2, "tanh", "fed", head).config(text_vocabulary()))
    converter = converter_for(write_recurrent(tmp_path, model, target_language="de", decoding={"beam_size": 2}))
    assert isinstance(converter, ReferenceRecurrentConverter)
    loaded = converter.load()
    inputs = batch(text_vocabulary())
    torch.testing.assert_close(module_of(loaded)(*inputs), model(*inputs), rtol=0, atol=0)
    assert (loaded.defaults.beam_size, loaded.target_languages) == (2, ("de",))


def test_our_tensors_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_recurrent(tmp_path, random_recurrent(Shape("gru").config(text_vocabulary())))

    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["encoder.0.cells.1.weight_hh"]
        weights["decoder.attention.place.weight"] = torch.zeros(1)

    edit_weights(folder, spoil)
    assert reasons_of(folder) == [
        "encoder.0.cells.1.weight_hh is missing",
        "decoder.attention.place.weight is not a part of this architecture",
    ]


# -- configurations --------------------------------------------------------------------------------------------------

GOOD = Shape("lstm", "additive", "concat", 2, "tanh", "new", "tied").config(50)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"cell": "lstn", "merge": "max", "decoder_width": 0, "max_positions": 1, "pad_id": 50, "dropout": 1.0},
            [
                "cell is 'lstn'",
                "merge is 'max'",
                "decoder_width is 0",
                "max_positions is 1",
                "pad_id is 50",
                "dropout is",
            ],
        ),
        ({"cell": "gru", "peepholes": True, "coupled_gates": True}, ["peepholes needs", "coupled_gates needs"]),
        ({"residual_from": 0}, ["residual_from is 0"]),
        ({"residual_from": 1, "bidirectional": "bottom"}, ["residual_from is 1, but encoder layer 1 turns 12"]),
        ({"decoder_layers": 3}, ["bridge_from 'each' needs as many encoder layers (2) as decoder layers (3)"]),
        ({"bridge": "copy", "decoder_width": 5}, ["bridge 'copy' needs states of one width"] * 2),
        ({"attention": "none", "bridge": "zero"}, ["without attention, fixed_context and bridge"]),
        (
            {"attention": "none", "window": "monotonic", "input_feeding": True},
            ["window 'monotonic' needs attention", "input_feeding needs attention"],
        ),
        (
            {"attention_width": 0, "fixed_context": True, "window": "predictive"},
            ["fixed_context is for", "additive attention and", "window 'predictive' needs a window_radius"],
        ),
        ({"attention": "dot", "encoder_width": 5}, ["attention 'dot' multiplies decoder states of 12"]),
        ({"attention_order": "previous", "input_feeding": True}, ["input_feeding needs attention_order 'new'"]),
        ({"context_to": "all"}, ["context_to 'all': no layer lies above"]),
        ({"readout_context": False}, ["the attention of a new state is not used"]),
        ({"readout_width": 0}, ["readout 'tanh' needs a readout_width", "tie_output needs"]),
        ({"source_vocab_size": 60}, ["share_embeddings needs one vocabulary"]),
        ({"encoder_layers": 0}, ["encoder_layers is 0; only a model that reads features"]),
        ({"source_features": 4, "reverse_source": True}, ["share_embeddings is for", "reverse_source is for"]),
        ({"feature_projection": True}, ["feature_projection needs"]),
        ({"context_gate": "scalar"}, ["context_gate needs attention_order 'previous'"]),
    ],
)
def test_a_configuration_says_every_reason(changes: dict[str, Any], reasons: list[str]) -> None:
    found = replace(GOOD, **changes).problems()
    assert len(found) == len(reasons), found
    for problem, reason in zip(found, reasons, strict=True):
        assert problem.startswith(reason)


def test_gnmt_is_a_configuration() -> None:
    ids = {"pad_id": PAD, "eos_id": EOS, "decoder_start_id": START}
    config = RecurrentConfig.gnmt(width=16, source_vocab_size=50, target_vocab_size=50, **ids)
    assert config.problems() == []
    assert (config.encoder_layers, config.decoder_layers) == (8, 8)
    shapes = {name: tuple(tensor.shape) for name, tensor in Recurrent(config).state_dict().items()}
    assert [f"encoder.{layer}.cells.1.weight_ih" in shapes for layer in range(8)] == [True] + [False] * 7
    decoder = [shapes[f"decoder.cells.{layer}.weight_ih"] for layer in range(8)]
    assert decoder == [(64, 32)] * 8  # a word or a state, and the context
    assert RecurrentConfig(**config.to_json()) == config
