"""Products with int4 weights in ONNX Runtime's operator for them, `MatMulNBits`.

It rounds each block of a row to 8 bits, by a scale of its own (accuracy level 4), multiplies whole numbers, and adds up
the blocks in float: nothing depends on the other rows. But it adds up a row that is alone in another order than one in
company, and what differs by 1e-7 may be rounded to another level in the next layer. So no row is ever alone: the first
one is multiplied once more, which takes no longer.

On disk a block is of signed numbers, which every runtime reads; this operator wants the same four bits with their zero
at 8. That is the highest bit of each, flipped: the runtime does it once, when it loads.
"""

from __future__ import annotations

import numpy as np
import onnx

from beamline.serving.rewrites.graph_writer import CONTRIB, PREFIX, GraphWriter, StoredWeights

_ROUNDED_TO_8_BITS = 4  # an accuracy level; those below compute in float, three times as slowly
_HIGHEST_BITS = 0x88  # of the two numbers in a byte


class Int4Products:
    def __init__(self, writer: GraphWriter) -> None:
        self._writer = writer
        self._guarded: dict[str, str] = {}
        self._in_company: dict[str, str] = {}

    def product(self, node: onnx.NodeProto, weights: StoredWeights, nan_spreads: bool) -> None:
        """`nan_spreads`: a row of the input is wholly NaN as soon as any of it is."""
        writer, (height, width) = self._writer, weights.shape
        x = node.input[0] if nan_spreads else self._keep_nan(node.input[0])
        packed = (height, width // weights.block, weights.block // 2)
        stored = writer.seen_as(weights.values, f"{weights.values}_bytes", onnx.TensorProto.UINT8, packed)
        highest_bits = writer.constant("highest_bits", np.uint8(_HIGHEST_BITS))
        values = writer.shared("BitwiseXor", [stored, highest_bits], name=f"{stored}_unsigned")
        product = writer.add(
            "MatMulNBits",
            [self._with_company(x, width), values, weights.scale],
            f"{PREFIX}{node.output[0]}_in_company",
            domain=CONTRIB,
            K=width,
            N=height,
            bits=4,
            block_size=weights.block,
            accuracy_level=_ROUNDED_TO_8_BITS,
        )
        first, last = writer.constant("first", np.array([0])), writer.constant("last", np.array([-1]))
        writer.add_from_rows("Slice", [product, first, last, first], node.output[0], node.input[0], height)

    def _with_company(self, x: str, width: int) -> str:
        """The rows of x, and the first of them again."""
        if x not in self._in_company:
            writer, name = self._writer, f"{PREFIX}{x}"
            rows = writer.flat(x, width)
            first = writer.add("Gather", [rows, writer.constant("first", np.array([0]))], f"{name}_first", axis=0)
            self._in_company[x] = writer.add("Concat", [rows, first], f"{name}_with_company", axis=0)
        return self._in_company[x]

    def _keep_nan(self, x: str) -> str:
        """Rounding may step over a NaN, unless the whole row is one: a sum times zero, added to each, makes it so."""
        if x not in self._guarded:
            writer, name = self._writer, f"{PREFIX}{x}"
            total = writer.add("ReduceSum", [x, writer.constant("last", np.array([-1]))], f"{name}_total")
            nothing = writer.add("Mul", [total, writer.constant("zero", np.float32(0))], f"{name}_no_number")
            self._guarded[x] = writer.add("Add", [x, nothing], f"{name}_all_or_nothing")
        return self._guarded[x]
