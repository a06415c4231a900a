"""Recurrent classifiers and embedders: our module, others' state dicts, and the exported graph, against PyTorch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beamline.converters.checkpoints.source import OwnFiles
from beamline.converters.families import any_converter_for
from beamline.converters.modules.recurrent.pooled import PooledConfig, RecurrentPooled
from beamline.converters.tasks.pooling import PoolingConverter
from beamline.serving.backends.onnxruntime_cpu import CpuGraphs
from beamline.serving.backends.pooled import PooledGraphBackend
from beamline.serving.contract.manifest import PooledManifest, read_any_manifest
from beamline.serving.errors import UnsupportedCheckpoint
from beamline.serving.models.repository import verify
from tests.support.checkpoints import PAD
from tests.support.compiled import compile_version
from tests.support.pairwise import covering
from tests.support.pooled import LABELS, USERS, pooled_config, pooled_model, write_pooled, write_user
from tests.support.recurrent import CELLS, DIRECTIONS

assert_same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def converter(folder: Path) -> PoolingConverter:
    found = any_converter_for(folder, None, OwnFiles())
    assert isinstance(found, PoolingConverter)
    return found


def texts(lengths: Sequence[int]) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(4, pooled_config().vocab_size) for _ in range(length)] for length in lengths]


def plain(model: RecurrentPooled, source: list[int]) -> dict[str, np.ndarray]:
    ids = torch.tensor([source])
    with torch.no_grad():
        found = model.outputs(ids, torch.ones_like(ids, dtype=torch.bool))
    return {name: tensor[0].numpy() for name, tensor in found.items()}


# -- the module ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_poolings_are_what_they_say_and_padding_changes_nothing() -> None:
    config = pooled_config(cell="gru", bidirectional="none", encoder_layers=1, attention_width=0, head_width=0)
    model = pooled_model(config)
    gru = nn.GRU(10, 7, batch_first=True)
    gru.load_state_dict({f"{name}_l0": p for name, p in model.encoder[0].cells[0].named_parameters()})  # type: ignore[index, union-attr]
    sources = texts([5, 1, 3])
    mask = torch.arange(5)[None, :] < torch.tensor([5, 1, 3])[:, None]
    padded = torch.tensor([source + [17] * (5 - len(source)) for source in sources])
    found = model.outputs(padded, mask)
    for row, source in enumerate(sources):
        states = gru(model.embedding(torch.tensor([source])))[0][0]
        weights = (states @ model.pooling.query).softmax(0)
        wanted = {"last": states[-1], "mean": states.mean(0), "max": states.amax(0), "attention": weights @ states}
        for how, vector in wanted.items():
            assert_same(found[f"vector_{how}"][row], vector)
        assert_same(found["probabilities"][row], model.output(wanted["attention"]).softmax(0))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"pooling": "sum", "cell": "gruu"}, ["cell is 'gruu'", "pooling is 'sum'"]),
        ({"encoder_layers": 0, "pad_id": -1}, ["encoder_layers is 0", "pad_id is -1"]),
        ({"labels": ("a", "a")}, ["labels has one of them twice"]),
        ({"labels": ("a",)}, ["one label alone is always certain"]),
        ({"cell": "gru", "peepholes": True}, ["peepholes needs cell 'lstm'"]),
    ],
)
def test_a_configuration_says_every_reason(changes: dict[str, Any], reasons: list[str]) -> None:
    found = replace(pooled_config(), **changes).problems()
    assert len(found) == len(reasons), found
    for problem, reason in zip(found, reasons, strict=True):
        assert problem.startswith(reason)


# -- others' ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_a_users_classifier_is_mapped_exactly(tmp_path: Path, kind: type[nn.Module]) -> None:
    theirs = kind().eval()
    loaded = converter(write_user(tmp_path, theirs)).load()
    model = loaded.graph.model
    assert isinstance(model, RecurrentPooled)
    for source in texts([1, 4, 9]):
        ids = torch.tensor([source])
        mask = torch.ones_like(ids, dtype=torch.bool)
        expected: Tensor = theirs(ids)
        assert_same(loaded.original(ids, mask)["probabilities"], expected)
        ours = model.outputs(ids, mask)
        assert_same(ours["probabilities"], expected)
        for name, vector in loaded.original(ids, mask).items():
            assert_same(ours[name], vector)


def test_parts_that_are_wrong(tmp_path: Path) -> None:
    changes = {"output": "nowhere", "query": "nothing", "query_projection": None, "head": None}
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter(write_user(tmp_path, USERS[0](), **changes)).load()
    assert caught.value.reasons == [
        "config.json: query is 'nothing', which the weights don't have",
        "config.json: output is 'nowhere', which the weights don't have",
    ]
    with pytest.raises(UnsupportedCheckpoint) as caught:
        converter(write_user(tmp_path, USERS[0](), labels=["yes", "no"])).load()
    assert caught.value.reasons == ["config.json: labels has 2 names, but the output 3 rows"]


# -- exported --------------------------------------------------------------------------------------------------------


def check_graph(folder: Path, model: RecurrentPooled) -> None:
    """Alone and in batches, every output equal to PyTorch's."""
    manifest = read_any_manifest(folder)
    assert isinstance(manifest, PooledManifest)
    verify(folder, manifest)
    parity = json.loads((folder / "parity.json").read_text())
    assert parity["label_exact_share"] == 1.0
    assert parity["max_difference"] < 1e-4
    backend = PooledGraphBackend(manifest, CpuGraphs(folder, manifest, threads=1), rows=16)
    sources = texts(range(1, 51))
    expected = [plain(model, source) for source in sources]
    assert set(expected[0]) == {*(f"vector_{how}" for how in manifest.poolings), "probabilities"}
    for size in (1, 7, 16):
        order = list(range(len(sources)))
        random.Random(size).shuffle(order)
        for begin in range(0, len(order), size):
            rows = order[begin : begin + size]
            found = backend.run([sources[row] for row in rows])
            for place, row in enumerate(rows):
                for name, wanted in expected[row].items():
                    assert_same(
                        found[name][place], wanted, err_msg=f"{name} of {len(sources[row])} in a batch of {size}"
                    )


def test_the_graph_computes_what_pytorch_does(pooled_repository: Path) -> None:
    check_graph(pooled_repository / "mood" / "1", pooled_model(pooled_config()))


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    config = pooled_config(vocab_size=50)
    with pytest.raises(UnsupportedCheckpoint, match=r"its tokenizer has [0-9]+ words, but its embedding only 50"):
        converter(write_pooled(tmp_path / "source", pooled_model(config))).convert("mood", tmp_path / "repository")
    assert not list((tmp_path / "repository").iterdir())


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cell", "direction", "pooling"),
    [*covering(list(CELLS), ["forward", "concat", "mean"], ["last", "mean", "max", "attention"])],
)
def test_every_cell_and_pooling_is_exported(tmp_path: Path, cell: str, direction: str, pooling: str) -> None:
    shape = {"bidirectional": "none", **DIRECTIONS[direction], **CELLS[cell]}
    config = pooled_config(pooling=pooling, encoder_width=5, **shape)
    model = quiet(pooled_model(config))
    converter(write_pooled(tmp_path / "source", model)).convert("mood", tmp_path / "repository")
    check_graph(tmp_path / "repository" / "mood" / "1", model)


@pytest.mark.full
@pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.__name__)
def test_every_users_classifier_is_exported(tmp_path: Path, kind: type[nn.Module]) -> None:
    found = converter(write_user(tmp_path / "source", kind()))
    manifest, certificate = found.convert("mood", tmp_path / "repository")
    assert (manifest.labels, manifest.family) == (LABELS, "torch_recurrent_pooled")
    assert certificate.max_difference < 1e-4
    compile_version(tmp_path / "repository" / "mood" / "1")  # for TensorRT


def quiet(model: RecurrentPooled) -> RecurrentPooled:
    """Weights that don't let a plain RNN explode."""
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(0.4)
    return model


def test_an_embedder_has_no_labels(tmp_path: Path) -> None:
    config = PooledConfig(**{**pooled_config().to_json(), "labels": (), "head_width": 0, "normalize": True})
    settings = converter(write_pooled(tmp_path, pooled_model(config))).load().settings
    assert (settings["task"], settings["normalize"], settings["poolings"][0]) == ("embed", True, "attention")
    assert settings["pad_id"] == PAD
