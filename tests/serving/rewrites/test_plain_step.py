"""Steps without edits, samples or reports: another branch of the graph, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from beamline.serving.backends.cpu import CpuBackend
from beamline.serving.contract.backend import Shape, Start, StepInputs, StepOutputs
from beamline.serving.rewrites.plain_step import with_plain_branch
from tests.support.few_bits import in_few_bits
from tests.support.marian_shape import PAD, MarianShape

SHAPE = Shape(3, 4, 32, 8)
SPECIAL = {"forced", "edit_index", "edit_scale", "edit_add", "sample_rows", "sampling", "report_rows"}


@pytest.fixture(params=["plain", "renormalising", "int8"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> MarianShape:
    if request.param == "int8":
        return in_few_bits(request.getfixturevalue("renormalising_model"), tmp_path / "int8", "int8")
    found: MarianShape = request.getfixturevalue(f"{request.param}_model")
    return found


def backend_of(model: MarianShape) -> CpuBackend:
    backend = CpuBackend(model.folder, model.manifest, threads=1)
    backend.allocate(SHAPE.batch, SHAPE)
    backend.resize(SHAPE, 0)
    for slot, memory in enumerate(backend.encode([[5, 6], [7, 8, 9], [4]])):
        backend.place(slot, memory, Start(PAD, (4, 1, 3)[slot], independent=slot == 1))
    return backend


def step_inputs(forced: int = -1, words: tuple[int, ...] = ()) -> StepInputs:
    """`words` are forbidden to all."""
    index = np.broadcast_to(np.array(words, np.int64), (SHAPE.batch, SHAPE.beams, len(words)))
    ones = np.ones(index.shape, np.float32)
    return StepInputs(np.array([forced, -1, -1]), index, ones, np.full_like(ones, -np.inf))


def steps(model: MarianShape, count: int = 6) -> Iterator[StepOutputs]:
    backend = backend_of(model)
    for _ in range(count):
        found = backend.run(step_inputs())
        yield StepOutputs(**{field.name: getattr(found, field.name).copy() for field in fields(found)})


def test_both_branches_compute_the_same(model: MarianShape, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(steps(model))
    monkeypatch.setattr(StepInputs, "plain", property(lambda self: False))
    for one, other in zip(plain, steps(model), strict=True):
        for field in fields(one):
            np.testing.assert_allclose(getattr(one, field.name), getattr(other, field.name), rtol=1e-5, atol=1e-5)


def test_what_is_plain() -> None:
    assert step_inputs().plain
    assert not step_inputs(forced=7).plain
    assert not step_inputs(words=(5,)).plain
    assert not replace(step_inputs(), report_rows=np.array([0])).plain
    assert not replace(step_inputs(), sample_rows=np.array([0]), sampling=np.zeros((1, 5), np.float32)).plain


def test_an_edit_between_plain_steps_counts(model: MarianShape) -> None:
    backend = backend_of(model)
    best = backend.run(step_inputs()).candidate_tokens[0, 0]
    backend = backend_of(model)
    assert best not in backend.run(step_inputs(words=(int(best),))).candidate_tokens
    backend.run(step_inputs())
    assert (backend.run(step_inputs(forced=17)).tokens[0] == 17).all()
    backend.run(step_inputs())


def test_the_plain_branch_reads_no_edits_and_is_short(model: MarianShape) -> None:
    graph = onnx.load(model.folder / "step.onnx", load_external_data=False)
    choice = with_plain_branch(graph).graph.node[-1]
    branches = {attribute.name: attribute.g for attribute in choice.attribute}
    plain, special = branches["then_branch"].node, branches["else_branch"].node
    assert SPECIAL.isdisjoint(name for node in plain for name in node.input)
    assert len(plain) < len(special) / 2
    assert sum(node.op_type == "LogSoftmax" for node in plain) == 1
