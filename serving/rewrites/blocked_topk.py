"""Finds the best words of a large vocabulary by blocks, when a step graph is loaded for the CPU.

ONNX Runtime's `TopK` compares word by word. A maximum of each block of words is several at a time, and the k best words
stand in the k blocks with the largest ones: only these are gone through. Ties are kept, the lower word first. Were a
word among the k best and its block not, then each of k blocks before it would have a word that is better, or as good
and lower. The blocks that are gone through are in the order of their words.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from beamline.serving.rewrites.graph_writer import PREFIX, GraphWriter

_FEWEST_WORDS = 4096  # of fewer, to go through all is as fast
_WIDTHS = sorted(range(32, 257), key=lambda width: abs(width - 64))  # of a block; measured: 64 is best


def with_blocked_topk(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the model. A vocabulary that no width divides stays as it is."""
    graph = model.graph
    words = {value.name: _words(value) for value in (*graph.input, *graph.value_info)}
    reshaped = {node.output[0] for node in graph.node if node.op_type == "Reshape"}  # may yet become something else
    writer = GraphWriter(graph)
    for node in graph.node:
        width = _block_width(words.get(node.input[0], 0)) if _is_of_beams(node) else 0
        if width and node.input[0] not in reshaped:
            _write(writer, node, words[node.input[0]] // width, width)
        else:
            writer.keep(node)
    writer.write()
    return model


def _words(value: onnx.ValueInfoProto) -> int:
    """V, of what is [B, K, V] and float; 0 where it is something else, or V is only known in a step."""
    kind = value.type.tensor_type
    sizes = kind.shape.dim
    return sizes[2].dim_value if len(sizes) == 3 and kind.elem_type == onnx.TensorProto.FLOAT else 0


def _is_of_beams(node: onnx.NodeProto) -> bool:
    given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    best_first = given.get("largest", 1) == given.get("sorted", 1) == 1
    return node.op_type == "TopK" and best_first and given.get("axis", -1) in (2, -1)


def _block_width(words: int) -> int:
    return next((width for width in _WIDTHS if words % width == 0), 0) if words >= _FEWEST_WORDS else 0


def _write(writer: GraphWriter, node: onnx.NodeProto, count: int, width: int) -> None:
    """N blocks of W words."""
    name = f"{PREFIX}{node.output[1]}"
    last = writer.constant("last", np.array([-1]))
    block = writer.constant(f"block_{width}", np.array(width))
    shape = writer.constant(f"blocks_{count}_{width}", np.array([0, 0, count, width]))
    blocks = writer.add("Reshape", [node.input[0], shape], f"{name}_blocks")  # [B, K, N, W]
    peaks = writer.add("ReduceMax", [blocks, last], f"{name}_peaks", keepdims=0)
    most = writer.add("Min", [node.input[1], writer.constant(f"count_{count}", np.array([count]))], f"{name}_most")
    best = _topk(writer, peaks, most, f"{name}_best")[1]
    places = _topk(writer, best, most, f"{name}_places", largest=0)[0]  # [B, K, k], in the order of their words
    index = writer.add("Unsqueeze", [places, last], f"{name}_index")
    taken = writer.add("GatherND", [blocks, index], f"{name}_taken", batch_dims=2)  # [B, K, k, W]
    flat = writer.add("Reshape", [taken, writer.constant("rows", np.array([0, 0, -1]))], f"{name}_flat")
    writer.keep(helper.make_node("TopK", [flat, node.input[1]], [node.output[0], f"{name}_among"], name=f"{name}_topk"))
    which = writer.add("Div", [f"{name}_among", block], f"{name}_which")
    within = writer.add("Mod", [f"{name}_among", block], f"{name}_within")
    place = writer.add("GatherElements", [places, which], f"{name}_place", axis=2)
    writer.add("Add", [writer.add("Mul", [place, block], f"{name}_begin"), within], node.output[1])


def _topk(writer: GraphWriter, values: str, k: str, name: str, largest: int = 1) -> tuple[str, str]:
    outputs = f"{name}_values", f"{name}_indices"
    writer.keep(helper.make_node("TopK", [values, k], outputs, name=f"{name}_topk", largest=largest))
    return outputs
