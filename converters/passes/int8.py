"""8-bit weights, portably: each large matrix becomes int8 behind a per-channel `DequantizeLinear`.

Every runtime understands that, TensorRT too. What makes it fast on a CPU (8-bit products) is derived from it when a
server loads the graph; see `serving/rewrites/quantized.py`.

A channel is what one output of a product sums over: a column of a matrix [in, out]; a row of an embedding [words,
width], which is also what a lookup takes and, where the output layer is tied to it, what gives one word's logit.

CPUs without VNNI add two neighbouring products in 16 bits. So a channel's scale is chosen by its largest pair of
neighbours, not by its largest number: then the other factor can have all of its 8 bits. That costs a weight half a
bit, and gives an activation, which needs it more, a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from beamline.serving.contract.manifest import LARGEST_PAIR

SMALLEST = 1024  # elements; what is smaller costs nothing in full precision
LARGEST = 127  # symmetric: -128 has no counterpart
_RECURRENT = ("LSTM", "GRU", "RNN")


def quantise_weights(model: ir.Model) -> int:
    """Rewrites the graph; returns how many matrices became int8."""
    count = 0
    for value in list(model.graph.initializers.values()):
        axis = _channel_axis(value)
        if axis is not None:
            _quantise(model.graph, value, axis)
            count += 1
    model.metadata_props[LARGEST_PAIR] = str(LARGEST + 1)
    return count


def _channel_axis(value: ir.Value) -> int | None:
    """Along which axis each channel has its own scale; none where the tensor stays as it is."""
    tensor = value.const_value
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT or tensor.size < SMALLEST:
        return None
    axes = {_axis_of_use(node, index) for node, index in value.uses()}
    return axes.pop() if len(axes) == 1 else None


def _axis_of_use(node: ir.Node, index: int) -> int | None:
    if node.op_type == "MatMul" and index == 1 and _rank(node.inputs[1]) == 2:
        return 1
    if node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0:
        return None if _turns(node.outputs[0].uses()) else 0
    if node.op_type == "Transpose" and _rank(node.inputs[0]) == 2 and _all_products(node.outputs[0].uses()):
        return 0
    if node.op_type in _RECURRENT and index in (1, 2):  # [directions, gates * width, in]
        return 1
    return None


def _turns(uses: Iterable[tuple[ir.Node, int]]) -> bool:
    """Sines and cosines: as small as they are, rounding them would shift every position."""
    return any(node.op_type == "RotaryEmbedding" for node, _ in uses)


def _all_products(uses: Iterable[tuple[ir.Node, int]]) -> bool:
    return all(node.op_type == "MatMul" and index == 1 for node, index in uses)


def _rank(value: ir.Value | None) -> int:
    tensor = None if value is None else value.const_value
    return -1 if tensor is None else len(tensor.shape)


def quantised(weights: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 values and one scale per channel; a channel of zeros has the scale 1. Rounding adds at most one to a pair of
    neighbours: it stays below `LARGEST` + 2."""
    magnitude = np.abs(weights)
    if weights.ndim == 2 and weights.shape[1 - axis] > 1:
        channels = np.moveaxis(magnitude, axis, 0)
        peak = (channels[:, 1:] + channels[:, :-1]).max(axis=1)
    else:
        peak = magnitude.max(axis=tuple(each for each in range(weights.ndim) if each != axis))
    scale = np.where(peak > 0, peak / LARGEST, 1).astype(np.float32)
    shape = [-1 if each == axis else 1 for each in range(weights.ndim)]
    return np.rint(weights / scale.reshape(shape)).astype(np.int8), scale


def _quantise(graph: ir.Graph, value: ir.Value, axis: int) -> None:
    assert value.const_value is not None
    name = str(value.name)
    stored, scale = quantised(value.const_value.numpy(), axis)
    inputs = [add_initializer(graph, f"{name}_int8", stored), add_initializer(graph, f"{name}_scale", scale)]
    node = ir.node("DequantizeLinear", inputs, attributes={"axis": axis}, name=f"{name}_dequantise")
    put_in_place(graph, value, [node])


def put_in_place(graph: ir.Graph, value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """What these nodes make of stored weights takes the place of the weights themselves."""
    name, found = str(value.name), nodes[-1].outputs[0]
    found.name, found.type, found.shape = f"{name}_float", value.type, value.shape
    ir.convenience.replace_all_uses_with(value, found)
    del graph.initializers[name]
    graph.insert_before(graph[0], nodes)


def add_initializer(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value
