"""Rewrites a portable quantized graph with ONNX Runtime's fast operators for int8 and int4, when a graph is loaded.

On disk a quantized weight stands behind `DequantizeLinear`, and products are float; every runtime understands that.
Here the products are found that have fast operators on the CPU; `int8.py` and `int4.py` write those.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import onnx
from onnx import TensorProto, helper

from beamline.serving.contract.manifest import FIXED_SCALES, LARGEST_PAIR
from beamline.serving.rewrites.graph_writer import CONTRIB, GraphWriter, StoredWeights
from beamline.serving.rewrites.int4 import Int4Products
from beamline.serving.rewrites.int8 import ANY_PAIR, WHOLE_BYTE, FixedScale, Int8Products, row_levels

_SPREADING = ("LayerNormalization", "RMSNormalization")  # one NaN in a row, and all of it is
# Nor does a row become less wholly NaN when it is cut into pieces.
_ELEMENTWISE = ("Add", "Sub", "Mul", "Sigmoid", "Tanh", "Relu", "Gelu", "Erf")
_LAYOUT = ("Reshape", "Squeeze", "Unsqueeze", "Split")
# An input of the step graph, [B, K], that its search reads behind the last product: there a NaN of a beam is seen.
_SCORES, _ROWS = "scores", "B K"


def with_quantized_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with the runtime's own operators; its weights stay outside. Changes the model."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    levels = row_levels(int(metadata.get(LARGEST_PAIR, ANY_PAIR)))
    fixed = {name: FixedScale(*values) for name, values in json.loads(metadata.get(FIXED_SCALES, "{}")).items()}
    _Rewriter(model.graph, levels, fixed if levels == WHOLE_BYTE else {}).rewrite()
    if all(opset.domain != CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return model


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto, levels: int, fixed: Mapping[str, FixedScale]) -> None:
        self._graph = graph
        self._writer = GraphWriter(graph)
        self._int8, self._int4 = Int8Products(self._writer, levels), Int4Products(self._writer)
        self._producers = {output: node for node in graph.node for output in node.output}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self._readers.update(value.name for value in graph.output)
        self._weights = dict(self._find_weights())
        self._products = {node.output[0]: found for node in graph.node if (found := self._multiplied(node)) is not None}
        self._end = max((index for index, node in enumerate(graph.node) if node.output[0] in self._products), default=0)
        self._watches = any(_SCORES in node.input for node in graph.node[self._end + 1 :])
        self._fixed = {output: fixed[x] for output, x in self._may_be_fixed() if x in fixed}
        self._biases = dict(self._find_biases())

    def rewrite(self) -> None:
        folded = {node.output[0] for node in self._biases.values()}
        scores = _SCORES
        for index, node in enumerate(self._graph.node):
            weights = self._products.get(node.output[0])
            looked_up = self._weights.get(node.input[0]) if node.op_type == "Gather" else None
            if weights is not None:
                self._multiply(node, weights)
            elif looked_up is not None and looked_up.axis == 0 and not looked_up.transposed:
                self._int8.lookup(node, looked_up)
            elif node.output[0] not in folded:
                if index > self._end and _SCORES in node.input and scores == _SCORES:
                    scores = self._int8.with_nan(_SCORES)
                node.input[:] = [scores if name == _SCORES else name for name in node.input]
                self._writer.keep(node)
        self._writer.write()

    def _multiply(self, node: onnx.NodeProto, weights: StoredWeights) -> None:
        x, spreads = node.input[0], self._nan_spreads(node.input[0])
        if node.output[0] in self._fixed:
            if not spreads or x == self._last:
                self._int8.watch(x, weights)
            self._int8.fixed_product(node, weights, self._fixed[node.output[0]], self._biases.get(node.output[0]))
        else:
            (self._int4 if weights.block else self._int8).product(node, weights, spreads)

    def _multiplied(self, node: onnx.NodeProto) -> StoredWeights | None:
        """By what, where that has a fast operator."""
        weights = self._weights.get(node.input[1]) if node.op_type == "MatMul" else None
        return weights if weights is not None and (weights.transposed or weights.axis == 1) else None

    def _may_be_fixed(self) -> Iterator[tuple[str, str]]:
        """Products whose rows may be rounded by a fixed scale, and what they read. Rounding makes a number of a NaN.
        Most of what is read comes from a sum that goes on, NaN and all, to the last product. Not so what attention has
        mixed, nor what only the last product reads: there it must be watched, or the row keeps a scale of its own."""
        for node in self._graph.node:
            weights, x = self._products.get(node.output[0]), (*node.input, "")[0]
            watched = self._watches and self._writer.leading(x) == _ROWS
            seen = watched or (x != self._last and self._nan_spreads(x))
            if weights is not None and not weights.block and seen:
                yield node.output[0], x

    @cached_property
    def _last(self) -> str:
        """What the last product reads: of the step graph, what becomes logits."""
        return self._graph.node[self._end].input[0] if self._products else ""

    def _find_biases(self) -> Iterator[tuple[str, onnx.NodeProto]]:
        """By product: the sum that may be computed within it."""
        for node in self._graph.node:
            product = next((name for name in node.input if name in self._fixed), "")
            alone = node.op_type == "Add" and product and self._readers[product] == 1
            if alone and any(map(self._is_stored_vector, node.input)):
                yield product, node

    def _find_weights(self) -> Iterator[tuple[str, StoredWeights]]:
        """What is multiplied by, or looked up in, by the name that it has as floats: matrices [in, out] with scales of
        their columns, or, transposed, [out, in] with scales of their rows or of blocks of these."""
        found = ((node, self._stored(node)) for node in self._graph.node)
        stored = {node.output[0]: weights for node, weights in found if weights is not None}
        yield from ((name, weights) for name, weights in stored.items() if not weights.block)
        for node in self._graph.node:
            weights = stored.get(node.input[0]) if node.op_type == "Transpose" else None
            if weights is not None and weights.axis == (1 if weights.block else 0):
                yield node.output[0], replace(weights, transposed=True)

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

    def _is_stored_vector(self, name: str) -> bool:
        """A stored vector, in full precision or in half."""
        cast = self._producers.get(name)
        tensor = self._writer.tensors.get(cast.input[0] if cast is not None and cast.op_type == "Cast" else name)
        return tensor is not None and len(tensor.dims) == 1

    def _nan_spreads(self, x: str) -> bool:
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
        return node.op_type in (*_ELEMENTWISE, *_LAYOUT) and all(map(self._nan_spreads, node.input))


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
