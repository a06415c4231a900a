"""The worked example of docs/add-a-family.md. The page itself is followed by tests/documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import beamline.converters.families as registry
from beamline.converters.modules.transformer.steps import DecoderOnlySteps
from beamline.serving.cli import main
from beamline.serving.errors import UnsupportedCheckpoint
from examples.toy_family.plain import LETTERS, LONGEST, train, write
from examples.toy_family.towns import TownsConverter


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towns") / "towns"
    write(train(steps=20), folder)
    return folder


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    """To be changed."""
    for path in trained.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_loaded_module_computes_what_the_original_does(checkpoint: Path) -> None:
    loaded = TownsConverter(checkpoint).load()
    assert isinstance(loaded.model, DecoderOnlySteps)
    tokens = torch.randint(len(LETTERS), (5, LONGEST), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.score(tokens), loaded.original(tokens), atol=1e-5, rtol=1e-5)


def test_every_reason_is_named_at_once(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**content, "heads": 0, "layers": "two"}))
    with pytest.raises(UnsupportedCheckpoint) as refused:
        TownsConverter(checkpoint).load()
    assert len(refused.value.reasons) == 2
    (checkpoint / "config.json").write_text(json.dumps({**content, "heads": 5}))
    with pytest.raises(UnsupportedCheckpoint, match="d_model 32 is not a multiple of heads 5"):
        TownsConverter(checkpoint).load()


def test_a_tensor_that_is_missing_or_left_over_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["layers.1.gate.weight"] = tensors.pop("layers.1.q.bias")
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint) as refused:
        TownsConverter(checkpoint).load()
    assert sorted(refused.value.reasons) == [
        "layers.1.gate.weight is not a part of this architecture",
        "layers.1.q.bias is missing",
    ]


def test_once_registered_it_is_found_by_its_model_type(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.families()
    monkeypatch.setattr(registry, "families", lambda: (*known, TownsConverter))
    assert registry.any_converter_for(checkpoint).family == "towns"  # the page's reader has a copy of it registered


@pytest.mark.full
def test_once_registered_the_command_converts_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = registry.families()
    monkeypatch.setattr(registry, "families", lambda: (*known, TownsConverter))
    assert main(["convert", str(checkpoint), "--name", "towns", "--repo", str(tmp_path / "models")]) == 0
    parity = json.loads((tmp_path / "models" / "towns" / "1" / "parity.json").read_text())
    assert (parity["beam_exact_share"], parity["text_exact_share"]) == (1.0, 1.0)
