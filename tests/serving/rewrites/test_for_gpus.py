"""What is made of a step graph for ONNX Runtime's CUDA provider computes the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx.parser import parse_model

from beamline.serving.backends import onnxruntime_cuda
from beamline.serving.contract.backend import PromptChunk, Shape, Start, StepInputs, StepOutputs
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.rewrites.scatters import with_scatters_in_place
from beamline.serving.rewrites.sizes import with_sizes_by_range
from beamline.serving.rewrites.splits import with_splits_as_slices
from tests.support.emulator import emulated_cuda_backend
from tests.support.fixture_cache import ROOT
from tests.support.language_models import ConvertedLanguageModel
from tests.support.marian_shape import PAD, VOCABULARY, MarianShape

SHAPE = Shape(3, 4, 64, 8)


@pytest.fixture(params=["plain", "renormalising"])
def model(request: pytest.FixtureRequest) -> MarianShape:
    found: MarianShape = request.getfixturevalue(f"{request.param}_model")
    return found


def inputs(number: int) -> StepInputs:
    """Edits, samples, reports and forced words, in turn and together."""
    chance = np.random.default_rng(number)
    edits = (0, 3, 16)[number % 3]
    index = chance.integers(0, VOCABULARY, (SHAPE.batch, SHAPE.beams, edits)).astype(np.int64)
    index = np.sort(index, axis=2)
    scale = np.where(index % 2, np.float32(1.5), np.float32(1))
    add = np.where(index % 5 == 0, np.float32(-np.inf), np.float32(0.25))
    rows = np.arange(4, 8) if number % 2 else np.zeros(0, np.int64)
    settings = np.tile(np.array([0.37, 0.8, 20, 0.9, 0.01], np.float32), (len(rows), 1))
    forced = np.array([7 if number % 4 == 3 else -1, -1, -1])
    return StepInputs(forced, index, scale, add, rows, settings, np.arange(number % 3, dtype=np.int64))


def steps(model: MarianShape) -> Iterator[StepOutputs]:
    backend = emulated_cuda_backend(model.folder, model.manifest)
    backend.allocate(SHAPE.batch, SHAPE)
    backend.resize(SHAPE, 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9], [4]])):
        backend.place(slot, memory, Start(PAD, 4, independent=slot == 1, samples=slot == 1))
    for number in range(10):
        found = backend.run(inputs(number))
        yield StepOutputs(**{field.name: getattr(found, field.name).copy() for field in fields(found)})


def test_the_same_numbers(model: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten = list(steps(model))
    monkeypatch.setattr(onnxruntime_cuda, "STEP_REWRITES", ())
    for one, other in zip(rewritten, steps(model), strict=True):
        for field in fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def of_a_prompt(model: ConvertedLanguageModel) -> Iterator[NDArray[np.floating]]:
    """Of two prompts in two pieces, of steps behind them, and of scores."""
    manifest = read_manifest(model.folder)
    backend = emulated_cuda_backend(model.folder, manifest)
    backend.allocate(2, Shape(2, 4, 64, 16))
    backend.resize(Shape(2, 4, 64, 16), 0)
    memories = backend.prompts([8, 8], [None, None])
    tokens = np.random.default_rng(0).integers(3, manifest.vocabulary.target_size, (2, 8))
    for begin in (0, 4):
        backend.take_in(memories, PromptChunk(tokens[:, begin : begin + 4], np.full(2, begin)))
    for slot, memory in enumerate(memories):
        for _ in backend.fill(slot, memory):
            pass
        backend.place(slot, memory, Start(int(tokens[slot, -1]), 4, independent=False))
    none = np.zeros((2, 4, 0), np.float32)
    for _ in range(5):
        yield backend.run(StepInputs(np.full(2, -1), none.astype(np.int64), none, none)).candidate_scores.copy()
    yield from backend.score_batch(None, tokens[:, :-1].tolist(), tokens[:, 1:].tolist())


def test_the_same_numbers_of_a_language_model(
    language_model: ConvertedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten = list(of_a_prompt(language_model))
    monkeypatch.setattr(onnxruntime_cuda, "REWRITES", ())
    monkeypatch.setattr(onnxruntime_cuda, "STEP_REWRITES", ())
    for one, other in zip(rewritten, of_a_prompt(language_model), strict=True):
        assert np.isfinite(one).any()
        np.testing.assert_array_equal(one, other)


def splitting(axis: int, sizes: list[int]) -> onnx.ModelProto:
    parts = [f"part_{number}" for number in range(len(sizes))]
    return parse_model(
        f"""<ir_version: 10, opset_import: ["": 23]>
        g (float[B, 6, 4, 8] x) => ({", ".join(f"float {part}" for part in parts)})
        <int64[{len(sizes)}] sizes = {{{", ".join(map(str, sizes))}}}>
        {{ {", ".join(parts)} = Split <axis: int = {axis}> (x, sizes) }}"""
    )


@pytest.mark.parametrize(("axis", "sizes"), [(1, [4, 2]), (2, [1, 2, 1]), (-2, [3, 1]), (-3, [1, 5])])
def test_an_unequal_split_becomes_slices(axis: int, sizes: list[int]) -> None:
    rewritten = with_splits_as_slices(splitting(axis, sizes))
    assert [node.op_type for node in rewritten.graph.node] == ["Slice"] * len(sizes)
    given = {"x": np.random.default_rng(0).random((3, 6, 4, 8), np.float32)}
    found, expected = (
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given)
        for model in (rewritten, splitting(axis, sizes))
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("axis", "sizes"), [(1, [3, 3]), (3, [6, 2]), (-1, [6, 2])])
def test_other_splits_stay(axis: int, sizes: list[int]) -> None:
    """Of equal parts, and along the last axis: they need no lists on the GPU."""
    assert [node.op_type for node in with_splits_as_slices(splitting(axis, sizes)).graph.node] == ["Split"]


@pytest.mark.parametrize("name", ["en-de", "en-de-gru"])
def test_the_shipped_models_are_rewritten(name: str) -> None:
    """They were exported before: nothing has to be converted again."""
    path = next(Path(ROOT / "model_repo" / name).glob("*/step.onnx"))
    graph = with_scatters_in_place(with_sizes_by_range(onnx.load(path, load_external_data=False))).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("ScatterND") == 2
    assert [node.name for node in graph.node if node.op_type == "Range" and "_there" in node.output[0]]
