"""Lets logit edits be written in place, when a graph is loaded for a GPU.

ONNX Runtime's CUDA kernel of `ScatterElements` copies all that it is given before it writes: [B, K, V] scores, twice a
step, also where nothing is edited. Its `ScatterND` writes in place where nobody else needs what was there. So a scatter
along the last axis, whose length the graph knows, becomes one over all numbers in a row. The lists that the host makes
write a word twice only with the same value, which is all that `ScatterND` asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def with_scatters_in_place(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the model."""
    graph = model.graph
    known = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
    nodes: list[onnx.NodeProto] = []
    offsets: dict[str, tuple[str, str]] = {}  # by list: where it writes, and the shape of what
    for node in graph.node:
        kind = _words(node, known)
        nodes += [node] if kind is None else _in_place(graph, node, kind, offsets)
    if offsets:
        del graph.node[:]
        graph.node.extend(nodes)
    return model


def _words(node: onnx.NodeProto, known: dict[str, onnx.TypeProto.Tensor]) -> onnx.TypeProto.Tensor | None:
    """What it writes to, where that is a scatter of [B, K, V] along its words."""
    if node.op_type != "ScatterElements":
        return None
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    kind = known.get(node.input[0]) or known.get(node.output[0])
    if given.get("reduction", b"none") != b"none" or given.get("axis", 0) not in (2, -1) or kind is None:
        return None
    return kind if len(kind.shape.dim) == 3 and kind.shape.dim[2].dim_value else None


def _in_place(
    graph: onnx.GraphProto, node: onnx.NodeProto, kind: onnx.TypeProto.Tensor, offsets: dict[str, tuple[str, str]]
) -> list[onnx.NodeProto]:
    data, index, updates = node.input
    width = kind.shape.dim[2].dim_value
    made: list[onnx.NodeProto] = []
    base = node.output[0]

    def add(kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        made.append(helper.make_node(kind, inputs, [f"{base}_{name}"], name=f"{base}_{name}_node", **attributes))
        return f"{base}_{name}"

    def constant(name: str, value: int | list[int]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), f"{base}_{name}"))
        return f"{base}_{name}"

    if index not in offsets:  # the same list is applied before and after the softmax
        # All sizes are those of the list: whoever asks the data may do so after it was written to, and that would keep
        # a copy of it.
        batch, beams = (
            add("Squeeze", [add("Shape", [index], f"axis_{place}", start=place, end=place + 1)], f"size_{place}")
            for place in (0, 1)
        )
        total = add("Mul", [add("Mul", [batch, beams], "rows"), constant("width", width)], "total")
        begins = add("Range", [constant("zero", 0), total, f"{base}_width"], "begins")
        rows = add("Shape", [index], "both", end=2)
        column = add("Concat", [rows, constant("one", [1])], "column", axis=0)
        places = add("Add", [index, add("Reshape", [begins, column], "offsets")], "places")  # [B, K, E]
        shape = add("Concat", [rows, constant("widths", [width])], "shape", axis=0)
        offsets[index] = add("Unsqueeze", [places, constant("last", [3])], "indices"), shape
    indices, shape = offsets[index]
    flat = add("Reshape", [data, constant("all", [-1])], "flat")
    written = add("ScatterND", [flat, indices, updates], "written")
    for name in (flat, written):  # only where it knows that two are as long will the runtime write one over the other
        graph.value_info.append(helper.make_tensor_value_info(name, kind.elem_type, ["all_numbers"]))
    made.append(helper.make_node("Reshape", [written, shape], [base], name=node.name))
    return made
