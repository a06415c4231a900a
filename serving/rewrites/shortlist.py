"""Rewrites the portable step graph so that its output projection is as wide as a shortlist, when a graph is loaded.

The rows of the projection (and biases, and the scales of 8-bit rows) become inputs. A second, small graph gathers them,
once for as long as the batch needs the same words. V words in the vocabulary, N in the shortlist, d the model's width:

    shortlist_words      [N]        the vocabulary's number of each word
    shortlist_positions  [V]        where each word stands in the shortlist; those that don't, at a place that is masked
    shortlist_mask       [B, 1, N]  0 where a request may say a word, -inf elsewhere
    shortlist_...        [d, N], [N]  what was gathered

Behind the projection the graph still speaks of words by their number: what it finds along the axis of words (a TopK, a
place in a cumulative sum) becomes such a number at once, and a number that picks along this axis becomes a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from beamline.serving.errors import ModelError
from beamline.serving.rewrites.graph_writer import keep_needed

WORDS, POSITIONS, MASK = "shortlist_words", "shortlist_positions", "shortlist_mask"
_PREFIX = "shortlist_"
_PASSED = ("Add", "Sub", "Mul", "Div", "Tanh")  # what may stand between the projection and the search
_FLAT = 2  # from this axis on, [B, K, N] becomes rows


@dataclass(frozen=True)
class ShortlistGraphs:
    step: onnx.ModelProto
    rows: onnx.ModelProto  # shortlist_words -> what the step graph wants of these words


def with_shortlist(model: onnx.ModelProto, vocabulary: int) -> ShortlistGraphs:
    """Changes the model, whose weights may be outside of it."""
    cut = _Cut(model.graph, vocabulary)
    cut.narrow()
    rows = helper.make_model(cut.rows_graph(), opset_imports=model.opset_import, ir_version=model.ir_version)
    return ShortlistGraphs(model, rows)


class _Cut:
    def __init__(self, graph: onnx.GraphProto, vocabulary: int) -> None:
        self._graph = graph
        self._vocabulary = vocabulary
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._producers = {output: node for node in graph.node for output in node.output}
        self._values = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
        self._row_nodes: list[onnx.NodeProto] = []
        self._row_outputs: list[onnx.ValueInfoProto] = []
        self._shared: dict[str, str] = {}

    def narrow(self) -> None:
        logits = self._logits()
        self._take_rows(logits)
        behind = self._behind(logits)
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            nodes += self._in_shortlist(node, behind)
            if logits in node.output:
                node.output[0] = f"{_PREFIX}unmasked"
                nodes.append(helper.make_node("Add", [node.output[0], MASK], [logits], name=f"{_PREFIX}masked"))
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        self._forget_widths(behind)
        self._graph.input.extend(
            [
                helper.make_tensor_value_info(WORDS, TensorProto.INT64, ["N"]),
                helper.make_tensor_value_info(POSITIONS, TensorProto.INT64, [self._vocabulary]),
                helper.make_tensor_value_info(MASK, TensorProto.FLOAT, ["B", 1, "N"]),
                *self._row_outputs,
            ]
        )
        keep_needed(self._graph, list(self._graph.node))

    def rows_graph(self) -> onnx.GraphProto:
        needed = [name for node in self._row_nodes for name in node.input if name != WORDS]
        nodes = self._constant_nodes(needed)
        used = {name for node in (*nodes, *self._row_nodes) for name in node.input}
        words = helper.make_tensor_value_info(WORDS, TensorProto.INT64, ["N"])
        tensors = [tensor for name, tensor in self._tensors.items() if name in used]
        return helper.make_graph([*nodes, *self._row_nodes], "rows", [words], self._row_outputs, tensors)

    # -- the projection ------------------------------------------------------------------------------------------

    def _logits(self) -> str:
        """What the rules of the search look at first."""
        for node in self._graph.node:
            if node.op_type == "GatherElements" and node.input[1] == "edit_index":
                return node.input[0]
        raise ModelError("the step graph applies no rules to its logits, so that no shortlist can be put before them")

    def _take_rows(self, value: str) -> None:
        """From the logits back to the product; whatever has a value for each word on the way is taken by rows."""
        node = self._producers.get(value)
        if node is not None and node.op_type == "MatMul" and self._is_constant(node.input[1]):
            node.input[1] = self._rows_of_matrix(node.input[1])
            return
        if node is None or node.op_type not in _PASSED:
            found = "an input" if node is None else f"the operator {node.op_type}"
            raise ModelError(f"no shortlist can be put behind {found}: a product with a constant matrix is expected")
        before = [name for name in node.input if not self._is_constant(name)]
        if len(before) != 1:
            raise ModelError(f"no shortlist can be put behind the operator {node.op_type} of two computed values")
        for index, name in enumerate(node.input):
            if name != before[0] and self._width(name) == self._vocabulary:
                node.input[index] = self._rows_of_vector(name)
        self._take_rows(before[0])

    def _rows_of_matrix(self, matrix: str) -> str:
        """[d, V] -> [d, N], in 8 bits where they are."""
        transpose = self._producers.get(matrix)
        stored = transpose.input[0] if transpose is not None and transpose.op_type == "Transpose" else matrix
        by_word = stored != matrix  # [V, d]
        quantized = self._producers.get(stored)
        if quantized is None or not self._has_scale_for_each_word(quantized, 0 if by_word else 1):
            return self._gathered_matrix(stored, by_word, "matrix", TensorProto.FLOAT)
        values = self._gathered_matrix(quantized.input[0], by_word, "int8", TensorProto.INT8)
        scale = self._rows_of_vector(quantized.input[1])
        output = f"{_PREFIX}float"
        node = helper.make_node("DequantizeLinear", [values, scale], [output], name=f"{output}_node", axis=1)
        self._graph.node.insert(0, node)
        return output

    @staticmethod
    def _has_scale_for_each_word(node: onnx.NodeProto, axis: int) -> bool:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        plain = len(node.input) == 2 and not attributes.get("block_size", 0)
        return node.op_type == "DequantizeLinear" and plain and attributes.get("axis", 1) == axis

    def _gathered_matrix(self, matrix: str, by_word: bool, name: str, kind: int) -> str:
        """Whole rows are taken, which is many times faster than columns; both transpositions are cheap beside that, and
        the first one happens once, when the graph is loaded."""
        width = self._shape(matrix)[1 if by_word else 0]
        if not by_word:
            matrix = self._row("Transpose", [matrix], f"{name}_by_word", perm=[1, 0])
        taken = self._row("Gather", [matrix, WORDS], f"{name}_rows", axis=0)
        return self._row_output(self._row("Transpose", [taken], name, perm=[1, 0]), kind, [width, "N"])

    def _rows_of_vector(self, vector: str) -> str:
        shape = self._shape(vector)
        name = f"of_{vector}"
        return self._row_output(
            self._row("Gather", [vector, WORDS], name, axis=-1), TensorProto.FLOAT, [*shape[:-1], "N"]
        )

    def _row(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = f"{_PREFIX}{name}"
        self._row_nodes.append(helper.make_node(operator, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def _row_output(self, name: str, kind: int, shape: list[str | int]) -> str:
        self._row_outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    # -- the search ----------------------------------------------------------------------------------------------

    def _behind(self, logits: str) -> set[str]:
        """Everything that depends on the logits, and they themselves."""
        behind = {logits}
        for node in self._graph.node:
            if behind.intersection(node.input):
                behind.update(node.output)
        return behind

    def _in_shortlist(self, node: onnx.NodeProto, behind: set[str]) -> Iterator[onnx.NodeProto]:
        """The node, with what maps places in the shortlist to words and back."""
        wide = bool(node.input) and node.input[0] in behind and self._width(node.input[0]) == self._vocabulary
        if wide and node.op_type in ("GatherElements", "ScatterElements"):
            name = f"{_PREFIX}place_of_{node.input[1]}"
            if name not in self._shared:
                self._shared[name] = name
                yield helper.make_node("Gather", [POSITIONS, node.input[1]], [name], name=f"{name}_node", axis=0)
            node.input[1] = name
            yield node
        elif wide and node.op_type == "TopK" and self._is_used(node.output[1]):
            yield from self._named(node, 1)
        elif wide and node.op_type == "ReduceSum" and self._kind(node.input[0]) == TensorProto.INT64:
            yield from self._named(node, 0)  # how many words lie below: the place of the next one
        elif wide and node.op_type == "Reshape" and len(self._shape(node.input[0])) == _FLAT + 1:
            yield helper.make_node("Flatten", [node.input[0]], list(node.output), name=node.name, axis=_FLAT)
        else:
            yield node

    @staticmethod
    def _named(node: onnx.NodeProto, output: int) -> Iterator[onnx.NodeProto]:
        word = node.output[output]
        node.output[output] = place = f"{_PREFIX}{word}_place"
        yield node
        yield helper.make_node("Gather", [WORDS, place], [word], name=f"{place}_word", axis=0)

    def _is_used(self, name: str) -> bool:
        outputs = any(output.name == name for output in self._graph.output)
        return outputs or any(name in node.input for node in self._graph.node)

    def _forget_widths(self, behind: set[str]) -> None:
        kept = [each for each in self._graph.value_info if each.name not in behind]
        del self._graph.value_info[:]
        self._graph.value_info.extend(kept)

    # -- what is constant ----------------------------------------------------------------------------------------

    def _is_constant(self, name: str) -> bool:
        if name in self._tensors:
            return True
        node = self._producers.get(name)
        return node is not None and all(self._is_constant(each) for each in node.input if each)

    def _constant_nodes(self, names: list[str]) -> list[onnx.NodeProto]:
        """What computes these from the weights, in order."""
        found: dict[str, onnx.NodeProto] = {}

        def add(name: str) -> None:
            node = self._producers.get(name)
            if node is not None and node.output[0] not in found:
                for each in node.input:
                    add(each)
                found[node.output[0]] = node

        for name in names:
            add(name)
        return list(found.values())

    def _shape(self, name: str) -> list[str | int]:
        if name in self._tensors:
            return list(self._tensors[name].dims)
        value = self._values.get(name)
        axes = value.type.tensor_type.shape.dim if value is not None else ()
        return [axis.dim_param or axis.dim_value for axis in axes]

    def _width(self, name: str) -> str | int | None:
        shape = self._shape(name)
        return shape[-1] if shape else None

    def _kind(self, name: str) -> int:
        value = self._values.get(name)
        return 0 if value is None else int(value.type.tensor_type.elem_type)
