"""A portable graph with weights in few bits -> ONNX Runtime's fast operators for them, when a graph is loaded.

On disk such a weight stands behind `DequantizeLinear`, and products are float; every runtime understands that. Here the
products are found that have fast operators on the CPU: `int8_dialect.py` and `int4_dialect.py` write those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from serving.backends.graph_writer import CONTRIB, GraphWriter, StoredWeights
from serving.backends.int4_dialect import Int4Products
from serving.backends.int8_dialect import ANY_PAIR, Int8Products, row_levels
from serving.manifest import LARGEST_PAIR

_SPREADING = ("LayerNormalization", "RMSNormalization")  # one NaN in a row, and all of it is
# Nor does a row become less wholly NaN when it is cut into pieces.
_ELEMENTWISE = ("Add", "Sub", "Mul", "Sigmoid", "Tanh", "Relu", "Gelu", "Erf")
_LAYOUT = ("Reshape", "Squeeze", "Unsqueeze", "Split")


def in_dialect(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model in the runtime's dialect, its weights still outside."""
    said = (int(entry.value) for entry in model.metadata_props if entry.key == LARGEST_PAIR)
    _Rewriter(model.graph, row_levels(next(said, ANY_PAIR))).rewrite()
    if all(opset.domain != CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return model


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto, levels: int) -> None:
        self._graph = graph
        self._writer = GraphWriter(graph)
        self._int8, self._int4 = Int8Products(self._writer, levels), Int4Products(self._writer)
        self._producers = {output: node for node in graph.node for output in node.output}
        self._weights = dict(self._find_weights())

    def rewrite(self) -> None:
        for node in self._graph.node:
            weights = self._weights.get(node.input[1]) if node.op_type == "MatMul" else None
            looked_up = self._weights.get(node.input[0]) if node.op_type == "Gather" else None
            if weights is not None and (weights.turned or weights.axis == 1):
                products = self._int4 if weights.block else self._int8
                products.product(node, weights, self._all_or_nothing(node.input[0]))
            elif looked_up is not None and looked_up.axis == 0 and not looked_up.turned:
                self._int8.lookup(node, looked_up)
            else:
                self._writer.keep(node)
        self._writer.write()

    def _find_weights(self) -> Iterator[tuple[str, StoredWeights]]:
        """What is multiplied by, or looked up in, by the name that it has as floats: matrices [in, out] with scales of
        their columns, or, turned, [out, in] with scales of their rows or of blocks of these."""
        found = ((node, self._stored(node)) for node in self._graph.node)
        stored = {node.output[0]: weights for node, weights in found if weights is not None}
        yield from ((name, weights) for name, weights in stored.items() if not weights.block)
        for node in self._graph.node:
            weights = stored.get(node.input[0]) if node.op_type == "Transpose" else None
            if weights is not None and weights.axis == (1 if weights.block else 0):
                yield node.output[0], replace(weights, turned=True)

    def _stored(self, node: onnx.NodeProto) -> StoredWeights | None:
        if node.op_type != "DequantizeLinear" or len(node.input) != 2:
            return None
        kind, shape = self._matrix(node.input[0])
        block = _attribute(node, "block_size", 0)
        if len(shape) != 2 or kind != (TensorProto.INT4 if block else TensorProto.INT8):
            return None
        return StoredWeights(node.input[0], node.input[1], _attribute(node, "axis", 1), shape, block)

    def _matrix(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Type and shape of a tensor in the graph, or of one that it is given: -1 where only the caller knows."""
        tensor = self._writer.tensors.get(name)
        if tensor is not None:
            return tensor.data_type, tuple(tensor.dims)
        given = next((value.type.tensor_type for value in self._graph.input if value.name == name), None)
        return (0, ()) if given is None else (given.elem_type, tuple(axis.dim_value or -1 for axis in given.shape.dim))

    def _all_or_nothing(self, x: str) -> bool:
        """Whether a row of x is wholly NaN as soon as any of it is, so that its maximum tells."""
        node = self._producers.get(x)
        if node is None:
            return x in self._writer.tensors
        if node.op_type == "Cast" and node.input[0] in self._writer.tensors:  # stored in half precision
            return True
        if node.op_type in _SPREADING or (node.op_type == "Gather" and node.input[0] in self._weights):
            return True
        if node.op_type == "MatMul" and node.input[1] in self._weights:
            return True
        return node.op_type in (*_ELEMENTWISE, *_LAYOUT) and all(map(self._all_or_nothing, node.input))


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
