"""What TensorRT rejects in a graph, or worse, accepts and ignores: every problem at once, before anything is built.

Each rule was found by compiling (tests/converters/tensorrt/test_lint.py holds TensorRT to it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from beamline.converters.tensorrt.graph import CACHE_AXIS, Graph, all_nodes, axes_of

MOST_CANDIDATES = 3840  # of TopK

_NEVER = {
    "NonZero": "its result's size depends on the data",
    "DynamicQuantizeLinear": "TensorRT has no such operator; quantise weights only",
    "MatMulInteger": "TensorRT has no such operator; use int8 weights behind DequantizeLinear",
    "ConvInteger": "TensorRT has no such operator; use int8 weights behind DequantizeLinear",
    "BitwiseAnd": "TensorRT has no bitwise operators",
    "BitwiseOr": "TensorRT has no bitwise operators",
    "BitwiseXor": "TensorRT has no bitwise operators",
    "BitwiseNot": "TensorRT has no bitwise operators",
    "BitShift": "TensorRT has no bitwise operators",
    "Unique": "its result's size depends on the data",
    "Compress": "its result's size depends on the data",
}
_BAD_TYPES: Mapping[int, str] = {
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.DOUBLE: "float64",
    TensorProto.STRING: "string",
}
# The inputs of Attention, by place.
_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6


def problems(graph: Graph) -> list[str]:
    """Sentences that each name a node; empty where TensorRT will take the graph as it is."""
    proto = graph.model.graph
    constants = _constants(proto)
    found: list[str] = []
    for value in (*proto.input, *proto.output):
        if value.type.tensor_type.elem_type in _BAD_TYPES:
            found.append(f"{value.name}: TensorRT has no {_BAD_TYPES[value.type.tensor_type.elem_type]}")
    for tensor in proto.initializer:
        if tensor.data_type in _BAD_TYPES:
            found.append(f"{tensor.name}: TensorRT has no {_BAD_TYPES[tensor.data_type]}")
    for node in all_nodes(proto):
        title = f"{node.op_type} {node.name or node.output[0]}"
        found += [f"{title}: {problem}" for problem in _node_problems(node, graph, constants)]
    return [*found, *_quantised_gru(proto)]


def _quantised_gru(proto: onnx.GraphProto) -> Iterator[str]:
    """LSTM and RNN are compiled with such weights, GRU is not: TensorRT's compiler fails inside, without a reason."""
    stored = {node.output[0] for node in proto.node if node.op_type == "DequantizeLinear"}
    for node in all_nodes(proto):
        if node.op_type == "GRU" and stored & set(node.input[1:3]):
            yield (
                f"GRU {node.name or node.output[0]}: its weights are int8, which TensorRT's compiler can't do; "
                "convert the model with --precision float32, float16 or bfloat16 for TensorRT"
            )


def _node_problems(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    if node.domain not in ("", "ai.onnx"):
        yield f"it is of the domain {node.domain}; only standard ONNX operators are portable"
    elif node.op_type in _NEVER:
        yield _NEVER[node.op_type]
    elif node.op_type in _CHECKS:
        yield from _CHECKS[node.op_type](node, graph, constants)


def _attention(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    if _given(node, _PAST_KEY) or _given(node, _PAST_VALUE):
        yield "past keys and values are rejected; append to the cache with TensorScatter"
    if _given(node, _LENGTHS):
        yield "nonpad_kv_seqlen is silently ignored: wrong numbers; give a mask"
    if _attribute(node, "softcap", 0.0):
        yield "softcap is rejected; write the scores as MatMul, Tanh and Softmax"
    if _attribute(node, "is_causal", 0):
        if _given(node, _MASK):
            yield "is_causal together with a mask is rejected; put both into the mask"
        elif _has_cache(graph):
            yield "is_causal is aligned at the upper left, which is wrong for a cache; give a mask"
    if any(node.output[1:]):
        yield "only its first output is supported; write the attention that is returned as MatMul and Softmax"
    if _has_cache(graph) and not _given(node, _MASK):
        yield "it has no mask, so beams would see each other's entries"


def _scatter(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    inputs = {value.name: value for value in graph.model.graph.input}
    outputs = {value.name for value in graph.model.graph.output}
    cache = inputs.get(node.input[0])
    if cache is None:
        yield f"the cache {node.input[0]} is no input of the graph, so it would be copied"
    else:
        axes = axes_of(cache)
        if len(axes) != 4:
            yield f"the cache {cache.name} has {len(axes)} axes; TensorRT takes [B, H, C, D]"
        elif not isinstance(axes[2], int) and graph.cache_length is not None:
            yield f"the cache {cache.name} has no fixed length"
    if node.output[0] not in outputs:
        yield f"its result {node.output[0]} is no output of the graph, so it would be copied"
    if _attribute(node, "axis", -2) not in (-2, 2):
        yield "it appends to another axis than the last but one"
    if _attribute(node, "mode", b"linear") != b"linear":
        yield "only the linear mode is an append to the tree"


def _top_k(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    count = constants.get(node.input[1])
    if count is not None:
        wanted = int(np.max(onnx.numpy_helper.to_array(count)))
        if wanted > MOST_CANDIDATES:
            yield f"k is {wanted}; TensorRT's limit is {MOST_CANDIDATES}"


def _lstm(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    if _attribute(node, "input_forget", 0):
        yield "coupled gates (input_forget) are rejected; write the cell as a Scan"


def _cast(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    to = _attribute(node, "to", 0)
    if to in _BAD_TYPES:
        yield f"TensorRT has no {_BAD_TYPES[to]}"


def _quantised(node: onnx.NodeProto, graph: Graph, constants: Mapping[str, onnx.TensorProto]) -> Iterator[str]:
    if not _given(node, 2):
        return
    zero = constants.get(node.input[2])
    if zero is None:
        yield "its zero point is computed; it must be a constant 0"
    elif zero.data_type == TensorProto.UINT8:
        yield "its zero point is uint8; TensorRT takes signed, symmetric int8"
    elif _small(zero) and np.any(onnx.numpy_helper.to_array(zero)):
        yield "its zero point is not 0; TensorRT takes symmetric int8"


_CHECKS: Mapping[str, Callable[[onnx.NodeProto, Graph, Mapping[str, onnx.TensorProto]], Iterator[str]]] = {
    "Attention": _attention,
    "TensorScatter": _scatter,
    "TopK": _top_k,
    "LSTM": _lstm,
    "Cast": _cast,
    "QuantizeLinear": _quantised,
    "DequantizeLinear": _quantised,
}


def _has_cache(graph: Graph) -> bool:
    return any(CACHE_AXIS in each.axes for each in graph.inputs)


def _constants(proto: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    found = {tensor.name: tensor for tensor in proto.initializer}
    for node in proto.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            found[node.output[0]] = node.attribute[0].t
    return found


def _small(tensor: onnx.TensorProto) -> bool:
    """Whether its values are in the graph itself."""
    return tensor.data_location != TensorProto.EXTERNAL


def _given(node: onnx.NodeProto, place: int) -> bool:
    return len(node.input) > place and node.input[place] != ""


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)
