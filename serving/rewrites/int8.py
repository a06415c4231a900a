"""Products with int8 weights in ONNX Runtime's fast 8-bit operators. Each becomes

    scale of a row = its largest magnitude / 127
    rows in 8 bits, their zero at 128  x  int8 weights  ->  float, column scales inside (`MatMulIntegerToFloat`)
    x  scale of the row

A row's scale is its own, so that an answer never depends on who else is in the batch. Where the converter has seen how
large an activation gets (`beamline convert --calibrate`), its scale is fixed instead, which is as independent, and less
to compute.

AVX2 adds two neighbouring products in 16 bits, where 32,767 fits. Our converter keeps two neighbouring weights so small
that 255 x their sum does, and says so in the graph; rows have 7 bits where a graph says nothing (2 x 127 x 127).
An embedding stays 8-bit: only the rows that were looked up are scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from beamline.serving.rewrites.graph_writer import CONTRIB, PREFIX, GraphWriter, StoredWeights

ANY_PAIR = 2 * 127  # what two weights can add up to
WHOLE_BYTE = 127  # levels on either side of zero
_LARGEST_SUM = 32_767


def row_levels(largest_pair: int) -> int:
    """On either side of zero; zero itself is one more than that in a quantized row. `largest_pair`: what two weights
    whose products are added first add up to at most."""
    return next(levels for levels in (WHOLE_BYTE, 63) if (2 * levels + 1) * largest_pair <= _LARGEST_SUM)


@dataclass(frozen=True)
class FixedScale:
    """What a byte means, whatever the row: (byte - zero) x scale."""

    scale: float
    zero: int


@dataclass(frozen=True)
class _Rows:
    """A quantized activation: [rows, width] of bytes, and [rows, 1] scales."""

    values: str
    scale: str


class Int8Products:
    def __init__(self, writer: GraphWriter, levels: int) -> None:
        self._writer = writer
        self._levels = levels
        self._rows: dict[str, _Rows] = {}
        self._watched: dict[str, str] = {}  # by activation: zeros, NaN where it or one before has any

    def fixed_product(
        self, node: onnx.NodeProto, weights: StoredWeights, fixed: FixedScale, bias: onnx.NodeProto | None
    ) -> None:
        """With a sum behind it that adds a bias, if there is one. Five operators less than where each row is scaled."""
        writer, x = self._writer, node.input[0]
        scale = writer.constant(f"{x}_scale", np.float32(fixed.scale))
        zero = writer.constant(f"{x}_zero", np.uint8(fixed.zero))
        levels = writer.shared("QuantizeLinear", [x, scale, zero], name=f"{PREFIX}{x}_fixed_levels")
        inputs = [levels, self._matrix(weights), scale, weights.scale, zero]
        if bias is not None:
            inputs += ["", next(name for name in bias.input if name != node.output[0])]
        output = (node if bias is None else bias).output[0]
        writer.add("MatMulIntegerToFloat", inputs, output, domain=CONTRIB)

    def watch(self, x: str, weights: StoredWeights) -> None:
        """Notes the rows of x that have a NaN, which a fixed scale would round to a number."""
        if x not in self._watched:
            name, width = f"{PREFIX}{x}_watched", self._width(weights)
            seen = [next(reversed(self._watched.values()))] if self._watched else []
            inputs = [self._writer.flat(x, width), self._zeros(width), *seen]
            self._watched[x] = self._writer.add("Gemm", inputs, name)

    def with_nan(self, scores: str) -> str:
        """The scores [B, K] of the rows that were watched: NaN where a row had one."""
        if not self._watched:
            return scores
        writer, seen = self._writer, next(reversed(self._watched.values()))
        shape = writer.add("Shape", [scores], f"{PREFIX}{scores}_shape")
        seen = writer.add("Reshape", [seen, shape], f"{PREFIX}{scores}_seen")
        return writer.add("Add", [scores, seen], f"{PREFIX}{scores}_watched")

    def _matrix(self, weights: StoredWeights) -> str:
        if not weights.transposed:
            return weights.values
        # The runtime transposes the 8-bit matrix once, when it loads.
        name = f"{PREFIX}{weights.values}_transposed"
        return self._writer.shared("Transpose", [weights.values], name=name, perm=[1, 0])

    @staticmethod
    def _width(weights: StoredWeights) -> int:
        """Of what it is multiplied with."""
        return weights.shape[1 if weights.transposed else 0]

    def _zeros(self, width: int) -> str:
        return self._writer.constant(f"zeros_{width}", np.zeros((width, 1), np.float32))

    def product(self, node: onnx.NodeProto, weights: StoredWeights, nan_spreads: bool) -> None:
        """`nan_spreads`: a row of the input is wholly NaN as soon as any of it is."""
        writer, width = self._writer, self._width(weights)
        height = weights.shape[0 if weights.transposed else 1]
        name = f"{PREFIX}{node.output[0]}"
        rows = self._quantize_rows(node.input[0], width, nan_spreads)
        one, offset = writer.constant("one", np.float32(1)), writer.constant("offset", np.uint8(self._levels + 1))
        inputs = [rows.values, self._matrix(weights), one, weights.scale, offset]
        product = writer.add("MatMulIntegerToFloat", inputs, f"{name}_product", domain=CONTRIB)
        writer.add_from_rows("Mul", [product, rows.scale], node.output[0], node.input[0], height)

    def lookup(self, node: onnx.NodeProto, weights: StoredWeights) -> None:
        writer = self._writer
        name, index = f"{PREFIX}{node.output[0]}_looked_up", node.input[1]
        rows = writer.add("Gather", [weights.values, index], f"{name}_rows", axis=0)
        scale = writer.add("Gather", [weights.scale, index], f"{name}_scale", axis=0)
        scale = writer.add("Unsqueeze", [scale, writer.constant("last", np.array([-1]))], f"{name}_scales")
        full = writer.add("Cast", [rows], f"{name}_full", to=onnx.TensorProto.FLOAT)
        writer.add("Mul", [full, scale], node.output[0])

    def _quantize_rows(self, x: str, width: int, nan_spreads: bool) -> _Rows:
        if x not in self._rows:
            writer, name = self._writer, f"{PREFIX}{x}"
            flat = writer.flat(x, width)
            magnitude = writer.add("Abs", [flat], f"{name}_magnitude")
            peak = writer.add("ReduceMax", [magnitude, writer.constant("last", np.array([-1]))], f"{name}_peak")
            column = writer.add("Mul", [peak, writer.constant("level", np.float32(1 / self._levels))], f"{name}_column")
            if not nan_spreads:
                column = self._keep_nan(flat, width, column, name)
            scale = writer.add("Reshape", [column, writer.constant("line", np.array([-1]))], f"{name}_scale")
            values = writer.add("QuantizeLinear", [flat, scale, self._offsets(x, scale)], f"{name}_levels", axis=0)
            self._rows[x] = _Rows(values, column)
        return self._rows[x]

    def _offsets(self, x: str, scale: str) -> str:
        """One offset per row; the same tensor for all activations that have as many rows."""
        writer, rows = self._writer, self._writer.leading(x)
        shape = writer.shared("Shape", [scale], key=("row_count", rows))
        offset = writer.constant("offsets", np.array([self._levels + 1], np.uint8))
        return writer.shared("Expand", [offset, shape], ("offsets", rows))

    def _keep_nan(self, flat: str, width: int, column: str, name: str) -> str:
        """The runtime's maximum may step over a NaN; a poisoned request would get a confident answer. A sum doesn't:
        of the row times zeros, it adds nothing to its scale, or makes it a NaN."""
        return self._writer.add("Gemm", [flat, self._zeros(width), column], f"{name}_guarded")
