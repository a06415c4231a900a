"""Keeps sizes where they are, when a graph is loaded for a GPU.

ONNX Runtime computes sizes on the host. Where an operator on the GPU computes with one (the parent of a candidate is
its index, divided by how many there are per beam), the runtime copies the number over at every step, from memory that
is not pinned: the host may have to wait, and a step that is recorded as a CUDA graph must not do that. `Range` takes
its bounds from the host and writes on the GPU: a range of one number is that number, there, without a copy.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

_OF_SIZES = frozenset(
    {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Concat", "Slice", "Gather", "Add", "Sub", "Mul", "Div"}
)
_COMPUTES = frozenset({"Add", "Sub", "Mul", "Div"})  # with tensors, too
_IN_RANGE: dict[int, type] = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.INT64: np.int64}


def with_sizes_by_range(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the model."""
    graph = model.graph
    types = {value.name: value.type.tensor_type for value in graph.value_info}
    constants = {"", *(tensor.name for tensor in graph.initializer)}
    sizes: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    ranges: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.op_type in ("Shape", "Size") or _only_sizes(node, sizes, constants):
            sizes.update(node.output)
        elif node.op_type in _COMPUTES:
            for place, name in enumerate(node.input):
                kind = types.get(name)
                if name in sizes and kind is not None and not kind.shape.dim and kind.elem_type in _IN_RANGE:
                    if name not in ranges:
                        nodes += _range(graph, name, kind.elem_type)
                        ranges[name] = nodes[-1].output[0]
                    node.input[place] = ranges[name]
        nodes.append(node)
    if ranges:
        del graph.node[:]
        graph.node.extend(nodes)
    return model


def _only_sizes(node: onnx.NodeProto, sizes: set[str], constants: set[str]) -> bool:
    return node.op_type in _OF_SIZES and not sizes.isdisjoint(node.input) and (sizes | constants).issuperset(node.input)


def _range(graph: onnx.GraphProto, size: str, kind: int) -> list[onnx.NodeProto]:
    """From the size to the number behind it: the size, on the GPU."""
    one, end, there = (f"{size}_{name}" for name in ("one", "end", "there"))
    graph.initializer.append(numpy_helper.from_array(np.array(1, _IN_RANGE[kind]), one))
    return [
        helper.make_node("Add", [size, one], [end], name=f"{end}_node"),
        helper.make_node("Range", [size, end, one], [there], name=f"{there}_node"),
    ]
