"""8-bit and 4-bit products: what they compute, that rows never see each other, and that no sum can overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from beamline.converters.passes.int4 import BLOCK, quantised_in_blocks
from beamline.converters.passes.int8 import LARGEST, quantised
from beamline.serving.contract.manifest import LARGEST_PAIR
from beamline.serving.rewrites.int8 import ANY_PAIR, row_levels
from beamline.serving.rewrites.quantized import with_quantized_operators

Floats = NDArray[np.float32]


def product_graph(
    weights: NDArray[np.int8], scale: Floats, *, transposed: bool = False, rank: int = 3
) -> onnx.ModelProto:
    """x @ dequantised weights; `transposed`: stored as an embedding is, [out, in]."""
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["float"], axis=0 if transposed else 1)]
    if transposed:
        nodes.append(helper.make_node("Transpose", ["float"], ["matrix"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "matrix" if transposed else "float"], ["y"]))
    return multiplying(nodes, weights.shape[1 if transposed else 0], weights, scale, rank)


def blocks_graph(levels: NDArray[np.int8], scale: Floats, rank: int = 3) -> onnx.ModelProto:
    """x @ the transpose of 4-bit weights [out, in] that have a scale per block."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["float"], axis=1, block_size=BLOCK),
        helper.make_node("Transpose", ["float"], ["matrix"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "matrix"], ["y"]),
    ]
    return multiplying(nodes, levels.shape[1], levels.astype(ml_dtypes.int4), scale, rank)


def multiplying(
    nodes: list[onnx.NodeProto], width: int, weights: NDArray[np.generic], scale: Floats, rank: int
) -> onnx.ModelProto:
    axes = ["B", "K"][: rank - 1]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*axes, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(scale, "s")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)


def int8_graph(random: np.random.Generator, width: int, height: int) -> onnx.ModelProto:
    weights = random.integers(-127, 128, (width, height)).astype(np.int8)
    return product_graph(weights, np.full(height, 0.01, np.float32), rank=2)


def int4_graph(random: np.random.Generator, width: int, height: int) -> onnx.ModelProto:
    levels = random.integers(-8, 8, (height, width)).astype(np.int8)
    return blocks_graph(levels, np.full((height, width // BLOCK), 0.1, np.float32), rank=2)


Graph = Callable[[np.random.Generator, int, int], onnx.ModelProto]
either_graph = pytest.mark.parametrize("graph", [int8_graph, int4_graph])


def run_fast(model: onnx.ModelProto, folder: Path, x: Floats) -> Floats:
    path = folder / "graph.onnx"
    onnx.save(model, path)
    session = ort.InferenceSession(
        with_quantized_operators(onnx.load(path)).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: Floats = session.run(None, {session.get_inputs()[0].name: x})[0]
    return found


def saying(model: onnx.ModelProto, pair: int) -> onnx.ModelProto:
    """With what two neighbouring weights add up to at most."""
    helper.set_model_props(model, {LARGEST_PAIR: str(pair)})
    return model


def by_hand(x: Floats, weights: NDArray[np.int8], scale: Floats, pair: int = ANY_PAIR) -> Floats:
    """The same in whole numbers that can't overflow."""
    most = row_levels(pair)
    row = np.abs(x).max(-1, keepdims=True) * np.float32(1 / most)
    levels = np.clip(np.rint(x / np.where(row == 0, 1, row)), -most - 1, most).astype(np.int64)
    found: Floats = ((levels @ weights.astype(np.int64)).astype(np.float32) * scale * row).astype(np.float32)
    return found


def blocks_by_hand(x: Floats, levels: NDArray[np.int8], scale: Floats) -> Floats:
    """Each block of a row in 8 bits of its own, times the weights', in whole numbers."""
    rows = x.reshape(*x.shape[:-1], -1, BLOCK)
    row_scale = np.abs(rows).max(-1) / np.float32(127)  # [..., blocks]
    rounded = np.rint(rows / row_scale[..., None])
    sums = np.einsum("...bi,obi->...bo", rounded, levels.reshape(len(levels), -1, BLOCK).astype(np.float64))
    found: Floats = np.einsum("...bo,...b,ob->...o", sums, row_scale, scale).astype(np.float32)
    return found


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_the_product_of_quantised_rows(
    tmp_path: Path, random: np.random.Generator, transposed: bool, rank: int
) -> None:
    weights = random.integers(-127, 128, (96, 40)).astype(np.int8)
    scale = random.uniform(0.001, 0.1, 40).astype(np.float32)
    x = (random.standard_normal((3, 5, 96)) * random.uniform(0.01, 100, (3, 5, 1))).astype(np.float32)
    x = x if rank == 3 else x.reshape(15, 96)
    stored = np.ascontiguousarray(weights.T) if transposed else weights
    found = run_fast(product_graph(stored, scale, transposed=transposed, rank=rank), tmp_path, x)
    np.testing.assert_allclose(found, by_hand(x, weights, scale), rtol=1e-5, atol=1e-6)
    exact = x @ (weights * scale)
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("rank", [2, 3])
def test_blocks_of_four_bits(tmp_path: Path, random: np.random.Generator, rank: int) -> None:
    matrix = random.standard_normal((40, 96)).astype(np.float32)  # [out, in]
    levels, scale = quantised_in_blocks(matrix)
    x = (random.standard_normal((3, 5, 96)) * random.uniform(0.01, 100, (3, 5, 1))).astype(np.float32)
    x = x if rank == 3 else x.reshape(15, 96)
    model = blocks_graph(levels, scale, rank)
    found = run_fast(model, tmp_path, x)
    np.testing.assert_allclose(found, blocks_by_hand(x, levels, scale), rtol=1e-3, atol=1e-4 * np.abs(found).max())
    as_it_is = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (portable,) = as_it_is.run(None, {"x": x})
    np.testing.assert_allclose(portable, x @ (levels * np.repeat(scale, BLOCK, axis=1)).T, rtol=1e-3, atol=1e-2)
    exact = x @ matrix.T
    assert np.linalg.norm(found - exact) < 0.12 * np.linalg.norm(exact)


def test_the_level_that_is_chosen_is_the_nearest(random: np.random.Generator) -> None:
    rows = random.standard_normal((7, 4 * BLOCK)).astype(np.float32)
    rows[3, :BLOCK] = 0
    levels, scale = quantised_in_blocks(rows)
    assert (levels.min(), levels.max()) == (-8, 7)
    found = levels * np.repeat(scale, BLOCK, axis=1)
    inside = (levels > -8) & (levels < 7)  # at the ends, what is larger is cut
    assert (np.abs(found - rows) <= 0.5001 * np.abs(np.repeat(scale, BLOCK, axis=1)))[inside].all()
    assert not found[3, :BLOCK].any()
    assert np.array_equal(scale, scale.astype(np.float16))
    small = rows * np.float32(1e-6)  # too small for half precision's
    levels, scale = quantised_in_blocks(small)
    assert np.linalg.norm(levels * np.repeat(scale, BLOCK, axis=1) - small) < 0.12 * np.linalg.norm(small)


@either_graph
def test_a_row_never_depends_on_its_neighbours(tmp_path: Path, random: np.random.Generator, graph: Graph) -> None:
    model = graph(random, 64, 200)
    x = random.standard_normal((33, 64)).astype(np.float32)
    x[7] *= 1e4
    together = run_fast(model, tmp_path, x)
    for row in range(len(x)):
        alone, pair = run_fast(model, tmp_path, x[row : row + 1])[0], run_fast(model, tmp_path, x[[row, 7]])[0]
        np.testing.assert_array_equal(pair, together[row])
        np.testing.assert_array_equal(alone, together[row])


@pytest.mark.parametrize(("pair", "levels"), [(ANY_PAIR, 63), (LARGEST + 1, 127)])
def test_no_sum_overflows(tmp_path: Path, pair: int, levels: int) -> None:
    """The largest magnitudes that can meet, of every combination of signs, in pairs as AVX2 adds them."""
    assert row_levels(pair) == levels
    width, high = 512, min(127, pair - 1)
    low = pair - high
    columns = [[high, low], [low, high], [-high, -low], [high, -low], [-low, high]]
    weights = np.stack([np.tile(column, width // 2) for column in columns], axis=1).astype(np.int8)
    scale = np.ones(len(columns), np.float32)
    x = np.stack([np.ones(width), -np.ones(width), np.tile([1.0, -1.0], width // 2)]).astype(np.float32)
    found = run_fast(saying(product_graph(weights, scale, rank=2), pair), tmp_path, x)
    np.testing.assert_allclose(found, by_hand(x, weights, scale, pair), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_two_neighbouring_weights_are_never_too_large(random: np.random.Generator, axis: int) -> None:
    weights = random.standard_cauchy((301, 203)).astype(np.float32)
    weights[:, 7] = weights[11] = 1.0  # nothing but largest numbers
    weights[:, 8] = weights[12] = 0.0
    values, scale = quantised(weights, axis)
    channels = np.abs(np.moveaxis(values, axis, 0).astype(np.int64))
    pairs = channels[:, 1:] + channels[:, :-1]
    assert LARGEST - 1 <= pairs.max() <= LARGEST + 1
    found = values * (scale[:, None] if axis == 0 else scale)
    assert (np.abs(found - weights) <= 0.5001 * (scale[:, None] if axis == 0 else scale)).all()


def test_rows_in_eight_bits_where_the_weights_allow_it(tmp_path: Path, random: np.random.Generator) -> None:
    matrix = random.standard_normal((96, 40)).astype(np.float32)
    weights, scale = quantised(matrix, 1)
    x = random.standard_normal((15, 96)).astype(np.float32)
    found = run_fast(saying(product_graph(weights, scale, rank=2), LARGEST + 1), tmp_path, x)
    np.testing.assert_allclose(found, by_hand(x, weights, scale, LARGEST + 1), rtol=1e-5, atol=1e-5)
    seven_bits = run_fast(product_graph(weights, scale, rank=2), tmp_path, x)
    exact = x @ (weights * scale)
    assert np.linalg.norm(found - exact) < 0.6 * np.linalg.norm(seven_bits - exact)


@either_graph
def test_a_row_of_zeros_and_a_row_of_nan(tmp_path: Path, random: np.random.Generator, graph: Graph) -> None:
    """Zeros give zeros; what is not a number stays one, and stays alone."""
    model = graph(random, 64, 16)
    x = random.standard_normal((4, 64)).astype(np.float32)
    x[1] = 0
    x[2] = np.nan
    found = run_fast(model, tmp_path, x)
    np.testing.assert_array_equal(found[1], np.zeros(16))
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(found[[0, 3]], run_fast(model, tmp_path, x[[0, 3]]))


@either_graph
def test_a_single_nan_is_not_lost(tmp_path: Path, random: np.random.Generator, graph: Graph) -> None:
    model = graph(random, 64, 16)
    for place in (0, 1, 17, 63):
        x = random.standard_normal((3, 64)).astype(np.float32)
        x[1, place] = np.nan
        found = run_fast(model, tmp_path, x)
        assert np.isnan(found[1]).any(), f"a NaN at {place} became a number"
        assert np.isfinite(found[[0, 2]]).all()


def test_a_lookup_scales_only_what_it_takes(tmp_path: Path, random: np.random.Generator) -> None:
    table = random.integers(-127, 128, (50, 8)).astype(np.int8)
    scale = random.uniform(0.001, 0.1, 50).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["w", "s"], ["float"], axis=0),
            helper.make_node("Gather", ["float", "tokens"], ["y"], axis=0),
        ],
        "lookup",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "K"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "K", 8])],
        [numpy_helper.from_array(table, "w"), numpy_helper.from_array(scale, "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    tokens = np.array([[3, 49, 0], [7, 7, 1]])
    found = run_fast(model, tmp_path, tokens)
    np.testing.assert_allclose(found, table[tokens] * scale[tokens][:, :, None], rtol=1e-6)


def test_what_is_looked_up_may_be_multiplied_at_once_and_again(tmp_path: Path, random: np.random.Generator) -> None:
    """An embedding, a product and another product, with nothing between them."""
    table, one, two = (random.integers(-127, 128, shape).astype(np.int8) for shape in ((50, 64), (64, 48), (48, 40)))
    scales = [random.uniform(0.001, 0.1, count).astype(np.float32) for count in (50, 48, 40)]
    nodes = [
        helper.make_node("DequantizeLinear", ["e", "es"], ["embedding"], axis=0),
        helper.make_node("Gather", ["embedding", "tokens"], ["x"], axis=0),
        helper.make_node("DequantizeLinear", ["a", "as"], ["first"], axis=1),
        helper.make_node("MatMul", ["x", "first"], ["between"]),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["second"], axis=1),
        helper.make_node("MatMul", ["between", "second"], ["y"]),
    ]
    named: dict[str, NDArray[np.generic]] = {"e": table, "es": scales[0], "a": one, "as": scales[1]}
    named |= {"b": two, "bs": scales[2]}
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "K"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "K", 40])],
        [numpy_helper.from_array(tensor, name) for name, tensor in named.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    tokens = np.array([[3, 49, 0], [7, 7, 1]])
    path = tmp_path / "graph.onnx"
    onnx.save(model, path)
    session = ort.InferenceSession(
        with_quantized_operators(onnx.load(path)).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {"tokens": tokens})
    x = table[tokens] * scales[0][tokens][:, :, None]
    expected = by_hand(by_hand(x, one, scales[1]), two, scales[2])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
