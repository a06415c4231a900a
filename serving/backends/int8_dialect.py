"""The portable int8 graph -> ONNX Runtime's fast 8-bit operators, when a graph is loaded.

On disk an int8 weight stands behind `DequantizeLinear`, and products are float. Here each such product becomes

    scale of a row = its largest magnitude / 63
    rows in 7 bits, their zero at 64  x  int8 weights  ->  float, column scales inside (`MatMulIntegerToFloat`)
    x  scale of the row

A row's scale is its own, so that an answer never depends on who else is in the batch. Seven bits, because AVX2 adds
pairs of products in 16 bits: 2 x 127 x 127 = 32,258 is the largest sum that can occur, and 32,767 fits.
An embedding stays 8-bit: only the rows that were looked up are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

ROW_LEVELS = 63  # on either side of zero
OFFSET = 64  # what zero is in a quantised row
_CONTRIB = "com.microsoft"
_PREFIX = "int8_"
_SPREADING = ("LayerNormalization", "RMSNormalization")  # one NaN in a row, and all of it is
_ELEMENTWISE = ("Add", "Sub", "Mul", "Sigmoid", "Tanh", "Relu", "Gelu", "Erf", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class _Weights:
    """An int8 tensor and its scales, as they stand in the graph."""

    values: str
    scale: str
    axis: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Rows:
    """A quantised activation: [rows, width] of bytes, and [rows, 1] scales."""

    values: str
    scale: str


def fast_int8(path: Path) -> bytes:
    """The graph in the runtime's dialect, its weights still outside."""
    model = onnx.load(path, load_external_data=False)
    _Rewriter(model.graph).rewrite()
    if all(opset.domain != _CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return bytes(model.SerializeToString())


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._shapes = {value.name: _dimensions(value) for value in (*graph.input, *graph.value_info)}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._producers = {output: node for node in graph.node for output in node.output}
        self._weights = dict(self._find_weights())
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[tuple[str, ...], str] = {}  # what several products can share
        self._rows: dict[str, _Rows] = {}

    def rewrite(self) -> None:
        for node in self._graph.node:
            weights = self._weights.get(node.input[1]) if node.op_type == "MatMul" else None
            looked_up = self._weights.get(node.input[0]) if node.op_type == "Gather" else None
            if weights is not None and weights.axis == 1:
                self._product(node, weights)
            elif looked_up is not None and looked_up.axis == 0:
                self._lookup(node, looked_up)
            else:
                self._nodes.append(node)
        self._drop_unused()

    def _find_weights(self) -> Iterator[tuple[str, _Weights]]:
        for node in self._graph.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in self._tensors and len(node.input) == 2:
                shape = tuple(self._tensors[node.input[0]].dims)
                if len(shape) == 2:
                    yield node.output[0], _Weights(node.input[0], node.input[1], _attribute(node, "axis", 1), shape)
        for node in self._graph.node:
            source = self._producers.get(node.input[0]) if node.op_type == "Transpose" else None
            if source is not None and source.op_type == "DequantizeLinear" and _attribute(source, "axis", 1) == 0:
                # The runtime turns the 8-bit matrix around once, when it loads.
                turned = f"{_PREFIX}{source.input[0]}_transposed"
                height, width = self._tensors[source.input[0]].dims
                yield node.output[0], _Weights(turned, source.input[1], 1, (width, height))

    # -- products ----------------------------------------------------------------------------------------------

    def _product(self, node: onnx.NodeProto, weights: _Weights) -> None:
        if weights.values not in self._tensors:
            original = weights.values.removeprefix(_PREFIX).removesuffix("_transposed")
            self._shared("Transpose", [original], name=weights.values, perm=[1, 0])
        name = f"{_PREFIX}{node.output[0]}"
        rows = self._quantise_rows(node.input[0], weights.shape[0])
        one, offset = self._constant("one", np.float32(1)), self._constant("offset", np.uint8(OFFSET))
        inputs = [rows.values, weights.values, one, weights.scale, offset]
        product = self._add("MatMulIntegerToFloat", inputs, f"{name}_product", domain=_CONTRIB)
        if self._is_matrix(node.input[0]):
            self._add("Mul", [product, rows.scale], node.output[0])
            return
        scaled = self._add("Mul", [product, rows.scale], f"{name}_scaled")
        self._add("Reshape", [scaled, self._shape_of_output(node.input[0], weights.shape[1])], node.output[0])

    def _quantise_rows(self, x: str, width: int) -> _Rows:
        if x not in self._rows:
            name = f"{_PREFIX}{x}"
            flat = x
            if not self._is_matrix(x):
                flat = self._add("Reshape", [x, self._constant(f"rows_{width}", np.array([-1, width]))], f"{name}_flat")
            magnitude = self._add("Abs", [flat], f"{name}_magnitude")
            peak = self._add("ReduceMax", [magnitude, self._constant("last", np.array([-1]))], f"{name}_peak")
            column = self._add("Mul", [peak, self._constant("level", np.float32(1 / ROW_LEVELS))], f"{name}_column")
            if not self._all_or_nothing(x):
                column = self._keep_nonsense(magnitude, column, name)
            scale = self._add("Reshape", [column, self._constant("line", np.array([-1]))], f"{name}_scale")
            values = self._add("QuantizeLinear", [flat, scale, self._offsets(x, scale)], f"{name}_rows", axis=0)
            self._rows[x] = _Rows(values, column)
        return self._rows[x]

    def _offsets(self, x: str, scale: str) -> str:
        """One offset per row; the same tensor for all activations that have as many rows."""
        rows = self._leading(x)
        shape = self._shared("Shape", [scale], key=("row_count", rows))
        return self._shared(
            "Expand", [self._constant("offsets", np.array([OFFSET], np.uint8)), shape], ("offsets", rows)
        )

    def _keep_nonsense(self, magnitude: str, column: str, name: str) -> str:
        """The runtime's maximum may step over a NaN; a poisoned request would get a confident answer. A sum doesn't:
        times zero, it adds nothing to the scale of a row, or makes it a NaN."""
        total = self._add("ReduceSum", [magnitude, self._constant("last", np.array([-1]))], f"{name}_sum")
        nothing = self._add("Mul", [total, self._constant("zero", np.float32(0))], f"{name}_nothing")
        return self._add("Add", [column, nothing], f"{name}_guarded")

    def _all_or_nothing(self, x: str) -> bool:
        """Whether a row of x is wholly NaN as soon as any of it is, so that its maximum tells."""
        node = self._producers.get(x)
        if node is None:
            return x in self._tensors
        if node.op_type in _SPREADING or (node.op_type == "Gather" and node.input[0] in self._weights):
            return True
        if node.op_type == "MatMul" and node.input[1] in self._weights:
            return True
        return node.op_type in _ELEMENTWISE and all(map(self._all_or_nothing, node.input))

    def _shape_of_output(self, x: str, width: int) -> str:
        leading = self._shared("Shape", [x], key=("leading", self._leading(x)), end=-1)
        return self._shared(
            "Concat", [leading, self._constant(f"width_{width}", np.array([width]))], (leading, str(width)), axis=0
        )

    def _leading(self, x: str) -> str:
        """A name for all axes but the last: two tensors with the same name have the same sizes there."""
        shape = self._shapes.get(x)
        return " ".join(map(str, shape[:-1])) if shape and all(shape) else f"of {x}"

    def _is_matrix(self, x: str) -> bool:
        return len(self._shapes.get(x, ())) == 2

    # -- lookups -----------------------------------------------------------------------------------------------

    def _lookup(self, node: onnx.NodeProto, weights: _Weights) -> None:
        name, index = f"{_PREFIX}{node.output[0]}", node.input[1]
        rows = self._add("Gather", [weights.values, index], f"{name}_rows", axis=0)
        scale = self._add("Gather", [weights.scale, index], f"{name}_scale", axis=0)
        scale = self._add("Unsqueeze", [scale, self._constant("last", np.array([-1]))], f"{name}_scales")
        full = self._add("Cast", [rows], f"{name}_full", to=onnx.TensorProto.FLOAT)
        self._add("Mul", [full, scale], node.output[0])

    # -- building ----------------------------------------------------------------------------------------------

    def _add(self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        node = helper.make_node(operator, inputs, [output], name=f"{output}_node", domain=domain, **attributes)
        self._nodes.append(node)
        return output

    def _shared(
        self, operator: str, inputs: list[str], key: tuple[str, ...] = (), name: str = "", **attributes: Any
    ) -> str:
        key = (operator, *key) if key else (operator, name)
        if key not in self._made:
            output = name or f"{_PREFIX}shared_{len(self._made)}"
            self._made[key] = self._add(operator, inputs, output, **attributes)
        return self._made[key]

    def _constant(self, name: str, value: np.generic | NDArray[np.generic]) -> str:
        name = f"{_PREFIX}constant_{name}"
        if name not in self._tensors:
            self._tensors[name] = numpy_helper.from_array(np.asarray(value), name)
            self._graph.initializer.append(self._tensors[name])
        return name

    def _drop_unused(self) -> None:
        """What only fed the float products: the runtime would still compute it at every load."""
        needed = {output.name for output in self._graph.output}
        kept = []
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        tensors = [tensor for tensor in self._graph.initializer if tensor.name in needed]
        del self._graph.node[:], self._graph.initializer[:]
        self._graph.node.extend(reversed(kept))
        self._graph.initializer.extend(tensors)


def _dimensions(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    """Sizes and names of axes; an empty name where neither is known."""
    return tuple(axis.dim_param or axis.dim_value or "" for axis in value.type.tensor_type.shape.dim)


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
