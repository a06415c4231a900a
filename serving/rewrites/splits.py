"""Lets a tensor be split without a list of sizes, when a graph is loaded for a GPU.

ONNX Runtime's CUDA kernel of `Split` reads the sizes of unequal parts on the GPU, unless they lie along the last axis:
in every run it copies lists there, from pinned memory that it keeps until a run waits for its end. Ours don't wait, so
that memory would grow for ever, and a step that is recorded as a CUDA graph would repeat those copies. `Slice` takes
where a part begins and ends from the host, with the launch: so such a split becomes a slice for each part. (The runtime
would join them to a split again, by an optimisation that has to be left out.)
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import onnx
from onnx import helper, numpy_helper


def with_splits_as_slices(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the model."""
    graph = model.graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        sizes = _unequal_sizes(node, constants)
        axis = next((helper.get_attribute_value(each) for each in node.attribute if each.name == "axis"), 0)
        if sizes is None or axis == -1 or axis + 1 == ranks.get(node.input[0]):
            nodes.append(node)
        else:
            nodes += _slices(graph, node, sizes, axis)
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _unequal_sizes(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> list[int] | None:
    """Of its parts, where it is a split whose parts are known to differ."""
    if node.op_type != "Split" or len(node.input) < 2 or node.input[1] not in constants:
        return None
    sizes: list[int] = numpy_helper.to_array(constants[node.input[1]]).tolist()
    return sizes if len(set(sizes)) > 1 else None


def _slices(graph: onnx.GraphProto, node: onnx.NodeProto, sizes: list[int], axis: int) -> list[onnx.NodeProto]:
    def constant(output: str, name: str, value: int) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), f"{output}_{name}"))
        return f"{output}_{name}"

    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        helper.make_node(
            "Slice",
            [node.input[0], constant(part, "begin", begin), constant(part, "end", end), constant(part, "axis", axis)],
            [part],
            name=f"{part}_slice",
        )
        for part, (begin, end) in zip(node.output, bounds, strict=True)
        if part
    ]
