"""Language models become versions: graphs that greedy and beam search of Hugging Face agree with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
import torch

from beamline.converters.certificate.graph_runner import Case, GraphRunner
from beamline.converters.certificate.verify import GRIDS, Tolerance
from beamline.converters.certificate.verify import verify as verify_parity
from beamline.converters.families import converter_for
from beamline.serving.contract.manifest import Manifest, StateKind, read_manifest
from beamline.serving.models.repository import verify
from tests.support.compiled import compile_version
from tests.support.language_models import (
    CHAT_TEMPLATE,
    EOS,
    LLAMA,
    SHAPES,
    VOCABULARY,
    ConvertedLanguageModel,
    LanguageShape,
    convert_language_model,
)

T = TypeVar("T")


def check_version(folder: Path) -> Manifest:
    parity = json.loads((folder / "parity.json").read_text())
    assert (parity["beam_exact_share"], parity["text_exact_share"]) == (1.0, 1.0)
    assert parity["max_log_prob_difference"] <= 1e-3
    assert parity["beams_compared"] >= 40
    assert parity["ties"] <= 2
    manifest = read_manifest(folder)
    verify(folder, manifest)
    assert manifest.task == "generate"
    assert manifest.graphs.encoder is None
    assert manifest.graphs.prefill is not None
    assert {tensor.kind for tensor in manifest.state} == {StateKind.CACHE}
    assert manifest.chat_template == CHAT_TEMPLATE
    return manifest


def operators(folder: Path, name: str) -> list[str]:
    return [node.op_type for node in onnx.load(folder / f"{name}.onnx", load_external_data=False).graph.node]


def check_graphs(folder: Path, layers: int, special: set[str]) -> None:
    for name, attentions in (("prefill", layers - 1), ("step", layers), ("score", layers)):
        found = operators(folder, name)
        assert found.count("Attention") == attentions, name  # of the last layer, a prompt only leaves keys and values
        assert found.count("TensorScatter") == (0 if name == "score" else 2 * layers), name
        assert ("TopK" in found) == (name == "step")
        assert special <= set(found), name
    prefill = onnx.load(folder / "prefill.onnx", load_external_data=False).graph
    assert [value.name for value in prefill.input][:4] == ["tokens", "positions", "write_index", "visible"]
    assert all(value.name.startswith("next_cache_") for value in prefill.output)


def check_greedy(model: ConvertedLanguageModel, lengths: tuple[int, ...], steps: int) -> None:
    """Against `generate`, which must not end: neither does the comparison."""
    runner = GraphRunner(model.folder, model.manifest)
    random = np.random.default_rng(7)
    cases = [Case((), tuple(random.integers(3, VOCABULARY, length).tolist())) for length in lengths]
    found = runner.beams(cases, 1, steps)
    for case, beams in zip(cases, found, strict=True):
        theirs = model.original.generate(
            torch.tensor([case.prompt]),
            do_sample=False,
            max_new_tokens=steps,
            min_new_tokens=steps,
            pad_token_id=EOS,
        )
        assert beams.sequences[0] == tuple(theirs[0].tolist())


def test_a_language_model(language_model: ConvertedLanguageModel) -> None:
    manifest = check_version(language_model.folder)
    assert manifest.family == "llama"
    check_graphs(language_model.folder, 2, {"RMSNormalization", "RotaryEmbedding"})
    check_greedy(language_model, (1, 2, 9, 30, 77), steps=20)


def test_a_smaller_grid(language_model: ConvertedLanguageModel) -> None:
    """`--grid quick`: the certificate says how much was compared."""
    loaded = converter_for(language_model.source).load()
    asked: list[str] = []

    def each(what: str, items: Sequence[T]) -> Iterable[T]:
        asked.append(what)
        return items

    folder, manifest = language_model.folder, language_model.manifest
    found = verify_parity(folder, manifest, loaded, Tolerance(), each, GRIDS["quick"])
    assert (found.beams_compared, found.beam_exact_share, found.longest_compared) == (14, 1.0, 64)
    assert asked == ["scores", "beam width 1", "beam width 4", "the longest sequence", "ids and text"]


def test_the_prefill_graph_survives_padding_behind_the_last_place(language_model: ConvertedLanguageModel) -> None:
    """A server pads chunks; what is written there is never seen, but it must be a number."""
    manifest = language_model.manifest
    runner = GraphRunner(language_model.folder, manifest)
    assert runner.prefill is not None
    last = manifest.limits.max_target_length - 1
    entries = last + 8
    feeds: dict[str, Any] = {
        "tokens": np.full((1, 8), 5),
        "positions": np.array([last - 2]),
        "write_index": np.array([last - 2]),
        "visible": np.tri(8, entries, last - 2, dtype=np.bool_)[None],
    }
    sizes = {"B": 1, "C": entries}
    for tensor in manifest.state:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape]
        feeds[tensor.name] = np.zeros(shape, np.float32)
    assert all(np.isfinite(value).all() for value in runner.prefill.run(None, feeds))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape is not LLAMA], ids=lambda shape: shape.name)
def test_every_shape_converts(tmp_path: Path, shape: LanguageShape) -> None:
    model = convert_language_model(shape, tmp_path)
    check_version(model.folder)
    norm = {"LayerNormalization", "Gelu"} if shape.name == "gpt2" else set()
    check_graphs(model.folder, 2, norm)
    check_greedy(model, (1, 3, 40, 90), steps=30)
    compile_version(model.folder)  # for TensorRT
