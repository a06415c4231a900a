"""8-bit products whose rows have a fixed scale: what they compute, and that a NaN is still seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from beamline.converters.passes.int8 import LARGEST, quantised
from beamline.serving.contract.manifest import FIXED_SCALES, LARGEST_PAIR
from beamline.serving.rewrites.int8 import ANY_PAIR
from beamline.serving.rewrites.quantized import with_quantized_operators

Floats = NDArray[np.float32]
WIDTH, INNER, WORDS = 48, 64, 40
SCALE, ZERO = 0.03, 100


class Graph:
    """norm -> product and bias -> relu -> product, added to what came in -> norm -> the output layer; in 8 bits."""

    def __init__(self, *, scores: bool, half_bias: bool = False) -> None:
        random = np.random.default_rng(0)
        shapes = {"inner": (WIDTH, INNER), "outer": (INNER, WIDTH), "words": (WIDTH, WORDS)}
        self.weights = {name: quantised(_normal(random, shape), 1) for name, shape in shapes.items()}
        self.bias = _normal(random, (INNER,)).astype(np.float16).astype(np.float32)
        tensors: dict[str, NDArray[np.generic]] = {"ones": np.ones(WIDTH, np.float32)}
        for name, (values, scale) in self.weights.items():
            tensors |= {f"{name}_int8": values, f"{name}_scale": scale}
        tensors["bias"] = self.bias.astype(np.float16) if half_bias else self.bias
        bias = "bias_full" if half_bias else "bias"
        nodes = [
            helper.make_node("DequantizeLinear", [f"{name}_int8", f"{name}_scale"], [name], axis=1)
            for name in self.weights
        ]
        nodes += [helper.make_node("Cast", ["bias"], [bias], to=TensorProto.FLOAT)] if half_bias else []
        nodes += [
            helper.make_node("LayerNormalization", ["x", "ones"], ["normed"]),
            helper.make_node("MatMul", ["normed", "inner"], ["hidden"]),
            helper.make_node("Add", ["hidden", bias], ["with_bias"]),
            helper.make_node("Relu", ["with_bias"], ["active"]),
            helper.make_node("MatMul", ["active", "outer"], ["change"]),
            helper.make_node("Add", ["x", "change"], ["sum"]),
            helper.make_node("LayerNormalization", ["sum", "ones"], ["last"]),
            helper.make_node("MatMul", ["last", "words"], ["logits"]),
        ]
        inputs: list[tuple[str, list[str | int]]] = [("x", ["B", "K", WIDTH])]
        outputs = ["logits"]
        if scores:
            nodes.append(helper.make_node("Identity", ["scores"], ["totals"]))
            inputs.append(("scores", ["B", "K"]))
            outputs.append("totals")
        graph = helper.make_graph(
            nodes,
            "layer",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in tensors.items()],
            value_info=[
                helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "K", width])
                for name, width in (("normed", WIDTH), ("active", INNER), ("last", WIDTH))
            ],
        )
        self.model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)

    def fast(self, fixed: Sequence[str], pair: int = LARGEST + 1) -> onnx.ModelProto:
        scales = dict.fromkeys(fixed, (SCALE, ZERO))
        helper.set_model_props(self.model, {LARGEST_PAIR: str(pair), FIXED_SCALES: json.dumps(scales)})
        return with_quantized_operators(self.model)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


def run(model: onnx.ModelProto, x: Floats) -> dict[str, Floats]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = {"x": x, "scores": np.zeros(x.shape[:2], np.float32)}
    wanted = {each.name: feeds[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(names, wanted), strict=True))


def norm(x: Floats) -> Floats:
    mean = x.mean(-1, keepdims=True)
    found: Floats = (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return found


def rounded(x: Floats) -> Floats:
    """What a byte keeps of it."""
    found: Floats = ((np.clip(np.rint(x / np.float32(SCALE)) + ZERO, 0, 255) - ZERO) * SCALE).astype(np.float32)
    return found


@pytest.fixture
def x() -> Floats:
    return _normal(np.random.default_rng(1), (2, 3, WIDTH))


@pytest.mark.parametrize("half_bias", [False, True])
def test_it_is_the_product_of_rounded_rows(x: Floats, half_bias: bool) -> None:
    graph = Graph(scores=True, half_bias=half_bias)
    inner, outer, words = (values * scale for values, scale in graph.weights.values())
    model = graph.fast(["normed", "active", "last"])
    found = run(model, x)["logits"]
    active = np.maximum(rounded(norm(x)) @ inner + graph.bias, 0)
    total = x + rounded(active) @ outer
    # What lies between two levels may be rounded to either, so a few may differ by one.
    expected = rounded(norm(total)) @ words
    assert np.abs(found - expected).max() < 3 * SCALE * np.abs(words).max()
    assert np.abs(found - expected).mean() < 0.1 * SCALE * np.abs(words).max()


def test_nothing_is_left_of_what_scales_each_row(x: Floats) -> None:
    graph = Graph(scores=True)
    counts = Counter(node.op_type for node in graph.fast(["normed", "active", "last"]).graph.node)
    assert counts["MatMulIntegerToFloat"] == counts["QuantizeLinear"] == 3
    assert counts["Abs"] == counts["ReduceMax"] == 0
    assert counts["Add"] == 2  # the bias is within its product: what goes on, and the scores
    assert counts["Gemm"] == 1  # only what becomes logits has to be watched


@pytest.mark.parametrize("fixed", [["normed"], ["normed", "last"], []])
def test_what_has_no_fixed_scale_has_one_for_each_row(x: Floats, fixed: list[str]) -> None:
    graph = Graph(scores=True)
    portable = run(graph.model, x)["logits"]
    counts = Counter(node.op_type for node in graph.fast(fixed).graph.node)
    assert counts["ReduceMax"] == 3 - len(fixed)
    found = run(graph.model, x)["logits"]
    assert np.abs(found - portable).mean() < 0.05 * np.abs(portable).mean()


def test_whole_bytes_only_where_no_sum_can_overflow(x: Floats) -> None:
    counts = Counter(node.op_type for node in Graph(scores=True).fast(["normed"], pair=ANY_PAIR).graph.node)
    assert counts["ReduceMax"] == 3


@pytest.mark.parametrize("place", [0, 17, WIDTH - 1])
@pytest.mark.parametrize("scores", [True, False])
def test_nan_is_seen_and_stays_alone(x: Floats, scores: bool, place: int) -> None:
    """In the scores, which are given; where there are none, in what the last product gives."""
    clean = run(Graph(scores=scores).fast(["normed", "active", "last"]), x)
    x[1, 2, place] = np.nan
    found = run(Graph(scores=scores).fast(["normed", "active", "last"]), x)
    seen = found["totals"] if scores else found["logits"].sum(-1)
    assert np.isnan(seen).tolist() == [[False, False, False], [False, False, True]]
    same = np.ones((2, 3), bool)
    same[1, 2] = False
    np.testing.assert_array_equal(found["logits"][same], clean["logits"][same])


def test_scores_that_are_read_too_early_show_nothing(x: Floats) -> None:
    """Then the last product keeps scales of its rows, which do."""
    graph = Graph(scores=True)
    nodes = list(graph.model.graph.node)
    del graph.model.graph.node[:]
    graph.model.graph.node.extend([nodes[-1], *nodes[:-1]])
    x[1, 2, 5] = np.nan
    found = run(graph.fast(["normed", "active", "last"]), x)
    assert np.isfinite(found["totals"]).all()
    assert np.isnan(found["logits"].sum(-1)).tolist() == [[False, False, False], [False, False, True]]


def test_a_row_never_depends_on_its_neighbours(x: Floats) -> None:
    model = Graph(scores=True).fast(["normed", "active", "last"])
    x[0, 1] *= 1e4
    together = run(model, x)["logits"]
    for row in range(2):
        for beam in range(3):
            alone = run(model, x[row : row + 1, beam : beam + 1])["logits"]
            np.testing.assert_array_equal(alone[0, 0], together[row, beam])
