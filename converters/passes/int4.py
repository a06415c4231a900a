"""4-bit weights, portably: int4 in blocks of neighbours that share a scale, behind a blocked `DequantizeLinear`.

Only matrices of products: they are most of a model, and read as a whole at every step. What is looked up in, too (an
embedding, with or without the output layer tied to it), and what has no whole blocks gets 8 bits.

A matrix [in, out] is stored as [out, in] and transposed by the graph, so that the numbers of a block lie beside each
other: as `MatMulNBits` wants them, into which a server on a CPU turns the product (`serving/rewrites/int4.py`).
Symmetric, because TensorRT takes no other zero.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from beamline.converters.passes.int8 import SMALLEST, add_initializer, put_in_place, quantise_weights

BLOCK = 32
LOWEST, HIGHEST = -8, 7
# What the largest of a block is rounded down by, tried in turn: the others are finer then.
_SHRINKING = (0.95, 0.9, 0.85, 0.8)
_NORMAL_HALVES = (2.0**-14, 65504.0)  # magnitudes that half precision holds to its 11 bits


def quantise_blocks(model: ir.Model) -> int:
    """Rewrites the graph; returns how many matrices became int4. The others become int8."""
    count = 0
    for value in list(model.graph.initializers.values()):
        if _in_blocks(value):
            _quantise(model.graph, value)
            count += 1
    quantise_weights(model)
    return count


def _in_blocks(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT or tensor.size < SMALLEST or len(tensor.shape) != 2:
        return False
    return tensor.shape.numpy()[0] % BLOCK == 0 and all(
        node.op_type == "MatMul" and index == 1 for node, index in value.uses()
    )


def quantised_in_blocks(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """[out, in] -> the same in -8 ... 7, and a scale per block [out, in / BLOCK]; a block of zeros has the scale 1.

    The largest magnitude becomes -8, whichever its sign, so that all 16 levels are used; of a few scales that is the
    one with the least squared error."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    place = np.abs(blocks).argmax(-1, keepdims=True)
    peak = np.take_along_axis(blocks, place, -1) / np.float32(LOWEST)
    peak = np.where(peak == 0, np.float32(1), peak)
    scale = _short(peak)
    levels, best = _rounded(blocks, scale)
    for part in _SHRINKING:
        candidate = _short(peak * np.float32(part))
        rounded, error = _rounded(blocks, candidate)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, candidate, scale)
        levels = np.where(better, rounded, levels)
    return levels.astype(np.int8).reshape(rows.shape), scale[..., 0]


def _rounded(
    blocks: NDArray[np.float32], scale: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The nearest levels, and the squared error of each block."""
    levels = np.clip(np.rint(blocks / scale), LOWEST, HIGHEST)
    return levels, np.square(levels * scale - blocks).sum(-1, keepdims=True)


def _short(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """As half precision has them, where it has such numbers at all: then they are stored in half the bytes."""
    low, high = _NORMAL_HALVES
    magnitude = np.abs(scale)
    if magnitude.min() < low or magnitude.max() > high:
        return scale
    return scale.astype(np.float16).astype(np.float32)


def _quantise(graph: ir.Graph, value: ir.Value) -> None:
    assert value.const_value is not None
    name = str(value.name)
    levels, scale = quantised_in_blocks(np.ascontiguousarray(value.const_value.numpy().T))
    stored = add_initializer(graph, f"{name}_int4", levels.astype(ml_dtypes.int4))
    inputs = [stored, add_initializer(graph, f"{name}_scale", scale)]
    node = ir.node("DequantizeLinear", inputs, attributes={"axis": 1, "block_size": BLOCK}, name=f"{name}_dequantise")
    transposed = ir.node("Transpose", node.outputs, attributes={"perm": [1, 0]}, name=f"{name}_transposed")
    rows = node.outputs[0]
    rows.name, rows.type, rows.shape = f"{name}_rows", value.type, ir.Shape(levels.shape)
    put_in_place(graph, value, [node, transposed])
