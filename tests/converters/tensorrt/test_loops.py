"""Attention inside the body of a loop or branch is unfolded, and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from beamline.converters.tensorrt.graph import Graph, load

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
SHAPES: dict[str, list[Any]] = {"q": ["B", 2, 3, 8], "k": ["B", 2, 5, 8], "v": ["B", 2, 5, 8]}


def branching(tmp_path: Path, mask: int | None, **attributes: Any) -> tuple[Path, Graph]:
    """Attention as a branch is taken, and outside of it."""
    names = ["q", "k", "v", *([] if mask is None else ["allowed"])]
    body = [helper.make_node("Attention", names, ["inner"], **attributes)]
    shown = []
    if mask is not None:  # a mask of the body's own, as a loop makes it
        body.insert(0, helper.make_node("Identity", ["mask"], ["allowed"]))
        shown = [helper.make_tensor_value_info("allowed", mask, ["B", 1, 3, 5])]
    inner = helper.make_tensor_value_info("inner", FLOAT, None)
    other = [helper.make_node("Identity", ["q"], ["same"])]
    node = helper.make_node(
        "If",
        ["c"],
        ["branch"],
        then_branch=helper.make_graph(body, "then", [], [inner], value_info=shown),
        else_branch=helper.make_graph(other, "else", [], [helper.make_tensor_value_info("same", FLOAT, None)]),
    )
    outer = helper.make_node("Attention", ["q", "k", "v"], ["y"])
    inputs: dict[str, tuple[int, list[Any]]] = {
        "c": (BOOL, []),
        **{name: (FLOAT, shape) for name, shape in SHAPES.items()},
    }
    if mask is not None:
        inputs["mask"] = (mask, ["B", 1, 3, 5])
    graph = helper.make_graph(
        [node, outer],
        "g",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in ("branch", "y")],
    )
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    return path, load("g", path)


@pytest.mark.parametrize("attributes", [{}, {"scale": 0.7}])
@pytest.mark.parametrize("mask", [None, BOOL, FLOAT])
def test_it_computes_the_same(tmp_path: Path, mask: int | None, attributes: dict[str, Any]) -> None:
    path, found = branching(tmp_path, mask, **attributes)
    assert found.count("Attention") == 1  # the one that is in no body
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        name: random.standard_normal([2, *shape[1:]]).astype(np.float32) for name, shape in SHAPES.items()
    }
    if mask is not None:
        allowed = np.tril(np.ones((2, 1, 3, 5), np.bool_), 1)
        feeds["mask"] = allowed if mask == BOOL else np.where(allowed, 0, -5).astype(np.float32)
    results = []
    for model in (path.read_bytes(), found.model.SerializeToString()):
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        results.append(session.run(["branch", "y"], {"c": np.array(True), **feeds}))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
