"""The best words of a large vocabulary, found by blocks: the same words in the same order, ties among them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from beamline.serving.rewrites.blocked_topk import with_blocked_topk

Floats = NDArray[np.float32]


def topk(words: int) -> onnx.ModelProto:
    """Of what another operator has made, as in a step graph."""
    nodes = [helper.make_node("Identity", ["scores"], ["x"]), helper.make_node("TopK", ["x", "k"], ["best", "tokens"])]
    scores, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "K", words]) for name in ("scores", "x"))
    outputs = [
        helper.make_tensor_value_info("best", TensorProto.FLOAT, ["B", "K", "M"]),
        helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "K", "M"]),
    ]
    k = helper.make_tensor_value_info("k", TensorProto.INT64, [1])
    graph = helper.make_graph(nodes, "topk", [scores, k], outputs, value_info=[x])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def found(model: onnx.ModelProto, scores: Floats, k: int) -> tuple[Floats, NDArray[np.int64]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    best, tokens = session.run(["best", "tokens"], {"scores": scores, "k": np.array([k])})
    return best, tokens


def operators(model: onnx.ModelProto) -> int:
    return len(model.graph.node)


@given(
    words=st.sampled_from((4096, 8000, 58101)),
    k=st.sampled_from((1, 2, 8, 64, 200)),  # the last: more than there are blocks
    levels=st.sampled_from((1, 3, 40, 100_000)),  # different scores: with few of them, nearly all are ties
    forbidden=st.sampled_from((0.0, 0.5, 0.9999)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_the_same_words_in_the_same_order(words: int, k: int, levels: int, forbidden: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = -random.integers(0, levels, (2, 3, words)).astype(np.float32)
    scores[random.random(scores.shape) < forbidden] = -np.inf
    plain, blocked = topk(words), with_blocked_topk(topk(words))
    assert operators(blocked) > operators(plain)
    for one, other in zip(found(plain, scores, k), found(blocked, scores, k), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_row_that_is_no_number_stays_one_and_its_neighbours_are_found() -> None:
    scores = np.random.default_rng(0).standard_normal((2, 2, 8000)).astype(np.float32)
    scores[0, 1] = np.nan
    best, tokens = found(with_blocked_topk(topk(8000)), scores, 8)
    assert np.isnan(best[0, 1]).all()
    assert ((tokens >= 0) & (tokens < 8000)).all()
    for row in ((0, 0), (1, 0), (1, 1)):
        np.testing.assert_array_equal(tokens[row], np.argsort(-scores[row], kind="stable")[:8])


@pytest.mark.parametrize("words", [500, 32_003])
def test_a_small_vocabulary_or_one_that_nothing_divides_stays_as_it_is(words: int) -> None:
    assert operators(with_blocked_topk(topk(words))) == operators(topk(words))
