"""Attention inside a loop, written as products and a softmax: there TensorRT has no attention layer, and fails without
saying so. A teacher-forced pass over somebody's own steps is such a loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

_UNSEEN = -30_000.0  # of a score; within the range of half precision


def unfold_attention(graph: onnx.GraphProto, inside: bool = False) -> None:
    """Changes the bodies of loops and branches; the graph's own attention stays one operator."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                unfold_attention(body, inside=True)
    if inside and any(node.op_type == "Attention" for node in graph.node):
        floats = {value.name for value in graph.value_info if not _is_bool(value)}
        nodes = [part for node in graph.node for part in _unfolded(node, floats)]
        del graph.node[:]
        graph.node.extend(nodes)


def _is_bool(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == onnx.TensorProto.BOOL)


def _unfolded(node: onnx.NodeProto, floats: Iterable[str]) -> Iterator[onnx.NodeProto]:
    """q, k, v [B, H, Q, D] and a mask that is true where something may be seen, or is added."""
    if node.op_type != "Attention" or len([name for name in node.output if name]) > 1 or len(node.input) > 4:
        yield node  # what else there is, the lint knows
        return
    query, key, value, mask = [*node.input, ""][:4]
    name = node.output[0]

    def of(part: str) -> str:
        return f"{name}_{part}"

    scale = next((attribute.f for attribute in node.attribute if attribute.name == "scale"), None)
    yield helper.make_node("Transpose", [key], [of("transposed")], perm=[0, 1, 3, 2])
    yield helper.make_node("MatMul", [query, of("transposed")], [of("product")])
    if scale is None:  # by the root of D
        yield helper.make_node("Shape", [query], [of("width")], start=-1)
        yield helper.make_node("Cast", [of("width")], [of("number")], to=onnx.TensorProto.FLOAT)
        yield helper.make_node("Sqrt", [of("number")], [of("root")])
        yield helper.make_node("CastLike", [of("root"), query], [of("divisor")])
        yield helper.make_node("Div", [of("product"), of("divisor")], [of("scores")])
    else:
        yield _constant(of("scale"), scale)
        yield helper.make_node("CastLike", [of("scale"), query], [of("factor")])
        yield helper.make_node("Mul", [of("product"), of("factor")], [of("scores")])
    scores = of("scores")
    if mask in floats:
        yield helper.make_node("Add", [scores, mask], [of("masked")])
        scores = of("masked")
    elif mask:
        yield _constant(of("unseen"), _UNSEEN)
        yield helper.make_node("CastLike", [of("unseen"), query], [of("hidden")])
        yield helper.make_node("Where", [mask, scores, of("hidden")], [of("masked")])
        scores = of("masked")
    yield helper.make_node("Softmax", [scores], [of("weights")], axis=-1)
    yield helper.make_node("MatMul", [of("weights"), value], [name])


def _constant(name: str, value: float) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, np.float32)))
