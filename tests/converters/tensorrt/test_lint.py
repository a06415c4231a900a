"""What TensorRT would reject or ignore is found before it is asked; and it really does so, or the rule is needless."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from beamline.converters.tensorrt import lint
from beamline.converters.tensorrt.build import BuildFailure, build
from beamline.converters.tensorrt.graph import Graph, load
from beamline.converters.tensorrt.library import BuildLog, find_library, logger_for
from beamline.converters.tensorrt.profiles import Extent

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SIZES = {"B": Extent(1, 2, 4), "K": Extent(1, 2, 4), "N": Extent(1, 4, 8)}
QKV: dict[str, Any] = {name: (FLOAT, ["B", 2, 8, 64]) for name in ("q", "k", "v")}
CACHE: dict[str, Any] = {"cache": (FLOAT, ["B", 2, 16, 8]), "new": (FLOAT, ["B", 2, 1, 8]), "at": (INT64, ["B"])}


def graph(
    tmp_path: Path,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Any]],
    outputs: Mapping[str, tuple[int, Any]],
    constants: dict[str, np.ndarray] | None = None,
    domains: tuple[str, ...] = (),
) -> Graph:
    proto = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 24), *(helper.make_opsetid(domain, 1) for domain in domains)]
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(proto, opset_imports=opsets, ir_version=10), path)
    return load("g", path)


def attention(tmp_path: Path, inputs: list[str], outputs: tuple[str, ...] = ("y",), **attributes: Any) -> Graph:
    given: dict[str, Any] = {
        **QKV,
        "mask": (BOOL, ["B", 1, 8, 8]),
        "past_k": (FLOAT, ["B", 2, 4, 64]),
        "past_v": (FLOAT, ["B", 2, 4, 64]),
        "lengths": (INT64, ["B"]),
    }
    node = helper.make_node("Attention", inputs, list(outputs), **attributes)
    shapes = {name: (FLOAT, None) for name in outputs if name}
    return graph(tmp_path, [node], {name: given[name] for name in inputs if name}, shapes)


def one(
    tmp_path: Path, operator: str, inputs: dict[str, Any], output: int, constants: Any = None, **more: Any
) -> Graph:
    names = [*inputs, *(constants or {})]
    return graph(tmp_path, [helper.make_node(operator, names, ["y"], **more)], inputs, {"y": (output, None)}, constants)


def scatter(tmp_path: Path, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("TensorScatter", ["cache", "new", "at"], ["next_cache"], **attributes)


def quantised_gru(tmp_path: Path) -> Graph:
    """As the 8-bit pass leaves a recurrent encoder."""
    width = 32
    shape = (1, 3 * width, width)
    constants: dict[str, np.ndarray] = {"bias": np.zeros((1, 6 * width), np.float32)}
    nodes = []
    for name in ("W", "R"):
        constants |= {f"{name}_int8": np.ones(shape, np.int8), f"{name}_scale": np.full(shape[1], 0.01, np.float32)}
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_int8", f"{name}_scale"], [name], axis=1))
    nodes.append(helper.make_node("GRU", ["x", "W", "R", "bias"], ["y"], hidden_size=width, linear_before_reset=1))
    return graph(tmp_path, nodes, {"x": (FLOAT, ["N", "B", width])}, {"y": (FLOAT, None)}, constants)


# name -> (how to make it, a piece of the sentence)
REJECTED = {
    "int8 GRU": (quantised_gru, "its weights are int8, which TensorRT's compiler can't do; convert the model with"),
    "past": (
        lambda path: attention(path, ["q", "k", "v", "mask", "past_k", "past_v"], ("y", "pk", "pv")),
        "past keys and values",
    ),
    "softcap": (lambda path: attention(path, ["q", "k", "v", "mask"], softcap=2.0), "softcap"),
    "causal with mask": (lambda path: attention(path, ["q", "k", "v", "mask"], is_causal=1), "together with a mask"),
    "scores": (lambda path: attention(path, ["q", "k", "v", "mask"], ("y", "", "", "s")), "first output"),
    "NonZero": (lambda path: one(path, "NonZero", {"x": (FLOAT, ["B", 4])}, INT64), "depends on the data"),
    "MatMulInteger": (
        lambda path: one(
            path,
            "MatMulInteger",
            {"a": (TensorProto.INT8, ["B", 4]), "b": (TensorProto.INT8, [4, 4])},
            TensorProto.INT32,
        ),
        "DequantizeLinear",
    ),
    "bitwise": (
        lambda path: one(path, "BitwiseXor", {"a": (INT64, ["B"]), "b": (INT64, ["B"])}, INT64),
        "bitwise",
    ),
    "uint32": (
        lambda path: one(path, "Cast", {"x": (INT64, ["B"])}, TensorProto.UINT32, to=TensorProto.UINT32),
        "uint32",
    ),
    "domain": (
        lambda path: graph(
            path,
            [helper.make_node("MatMulNBits", ["x"], ["y"], domain="com.microsoft")],
            {"x": (FLOAT, ["B", 4])},
            {"y": (FLOAT, None)},
            domains=("com.microsoft",),
        ),
        "com.microsoft",
    ),
    "top 4000": (
        lambda path: graph(
            path,
            [helper.make_node("TopK", ["x", "k"], ["y", "i"])],
            {"x": (FLOAT, ["B", 5000])},
            {"y": (FLOAT, None), "i": (INT64, None)},
            {"k": np.array([4000])},
        ),
        "3840",
    ),
    "coupled gates": (
        lambda path: graph(
            path,
            [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3, input_forget=1)],
            {"x": (FLOAT, [5, "B", 4])},
            {"y": (FLOAT, None)},
            {"w": np.zeros((1, 12, 4), np.float32), "r": np.zeros((1, 12, 3), np.float32)},
        ),
        "Scan",
    ),
    "cache of an intermediate": (
        lambda path: graph(
            path,
            [helper.make_node("Relu", ["x"], ["cache"]), scatter(path)],
            {"x": CACHE["cache"], "new": CACHE["new"], "at": CACHE["at"]},
            {"next_cache": (FLOAT, None)},
        ),
        "no input of the graph",
    ),
    "cache that is not returned": (
        lambda path: graph(
            path,
            [scatter(path), helper.make_node("Relu", ["next_cache"], ["y"])],
            CACHE,
            {"y": (FLOAT, None)},
        ),
        "no output of the graph",
    ),
}
# TensorRT takes these, and computes something else.
MISUNDERSTOOD = {
    "lengths": (
        lambda path: attention(path, ["q", "k", "v", "mask", "", "", "lengths"]),
        "silently ignored",
    ),
}


def refused_by_tensorrt(found: Graph) -> bool:
    """By its parser, or when it is built."""
    library, said = find_library("tensorrt_rtx"), BuildLog()
    trt, logger = library.module, logger_for(library, said)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(found.model.SerializeToString()):
        return True
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    for each in found.inputs:
        sizes = [SIZES[axis] if isinstance(axis, str) else Extent(axis, axis, axis) for axis in each.axes]
        profile.set_shape(each.name, [s.smallest for s in sizes], [s.usual for s in sizes], [s.largest for s in sizes])
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    return builder.build_serialized_network(network, config) is None


@pytest.mark.parametrize("name", REJECTED)
def test_what_tensorrt_rejects_is_found_before(tmp_path: Path, name: str) -> None:
    make, sentence = REJECTED[name]
    found = make(tmp_path)
    assert any(sentence in problem for problem in lint.problems(found)), lint.problems(found)
    assert refused_by_tensorrt(found)


@pytest.mark.parametrize("name", MISUNDERSTOOD)
def test_what_tensorrt_misunderstands_is_found_before(tmp_path: Path, name: str) -> None:
    make, sentence = MISUNDERSTOOD[name]
    found = make(tmp_path)
    assert any(sentence in problem for problem in lint.problems(found)), lint.problems(found)


def test_an_input_that_is_ignored_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second net: even where no rule knows the form, "Unused Input" is an error."""
    make, _ = MISUNDERSTOOD["lengths"]
    monkeypatch.setattr(lint, "problems", lambda graph: [])
    library = find_library("tensorrt_rtx")
    with pytest.raises(BuildFailure, match=r"(?i)unused input") as kept:
        build(make(tmp_path), SIZES, library, "80")
    # What it leaves alive does not disturb the next one. And an input that no node reads is simply none of the plan's.
    node = helper.make_node("Relu", ["x"], ["y"])
    fine = graph(tmp_path, [node], {"x": (FLOAT, ["B", 8]), "unread": (FLOAT, ["B"])}, {"y": (FLOAT, ["B", 8])})
    assert [each.name for each in build(fine, SIZES, library, "80").inputs] == ["x"]
    assert kept.value.reasons


def test_every_problem_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("TopK", ["x", "k"], ["y", "i"]),
        helper.make_node("Attention", ["q", "k2", "v"], ["a"], softcap=1.0),
    ]
    inputs: dict[str, Any] = {"x": (FLOAT, ["B", 5000]), "q": QKV["q"], "k2": QKV["k"], "v": QKV["v"]}
    outputs: Any = {"n": (INT64, None), "y": (FLOAT, None), "i": (INT64, None), "a": (FLOAT, None)}
    found = graph(tmp_path, nodes, inputs, outputs, {"k": np.array([4000])})
    with pytest.raises(BuildFailure) as failure:
        build(found, SIZES, find_library("tensorrt_rtx"), "80")
    assert len(failure.value.reasons) == 3


def test_a_form_inside_a_branch_is_found(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("NonZero", ["x"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, INT64, None)])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    found = graph(tmp_path, [node], {"c": (BOOL, []), "x": (FLOAT, [4])}, {"y": (INT64, None)})
    assert len(lint.problems(found)) == 2


def test_asymmetric_quantisation_is_found(tmp_path: Path) -> None:
    for zero in (np.array(3, np.int8), np.array(128, np.uint8)):
        kind = TensorProto.INT8 if zero.dtype == np.int8 else TensorProto.UINT8
        found = one(
            tmp_path,
            "DequantizeLinear",
            {"x": (kind, ["B", 4])},
            FLOAT,
            {"scale": np.array(0.1, np.float32), "zero": zero},
        )
        assert len([problem for problem in lint.problems(found) if "zero point" in problem]) == 1
