"""Writing a graph anew, node by node, its weights still outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

CONTRIB = "com.microsoft"
PREFIX = "fast_"  # of what was not in the graph before


@dataclass(frozen=True)
class StoredWeights:
    """A matrix in few bits and its scales, as they stand in the graph."""

    values: str
    scale: str
    axis: int  # which has the scales: one per channel, or the one that blocks cut
    shape: tuple[int, ...]
    block: int = 0  # how many neighbours share a scale; 0 where a whole channel does
    transposed: bool = False  # what is multiplied is its transpose


class GraphWriter:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._shapes = {value.name: _dimensions(value) for value in (*graph.input, *graph.value_info)}
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._made: dict[tuple[str, ...], str] = {}  # what several nodes can share

    def keep(self, node: onnx.NodeProto) -> None:
        self._nodes.append(node)

    def add(self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        node = helper.make_node(operator, inputs, [output], name=f"{output}_node", domain=domain, **attributes)
        self._nodes.append(node)
        return output

    def shared(
        self, operator: str, inputs: list[str], key: tuple[str, ...] = (), name: str = "", **attributes: Any
    ) -> str:
        key = (operator, *key) if key else (operator, name)
        if key not in self._made:
            output = name or f"{PREFIX}shared_{len(self._made)}"
            self._made[key] = self.add(operator, inputs, output, **attributes)
        return self._made[key]

    def constant(self, name: str, value: np.generic | NDArray[np.generic]) -> str:
        name = f"{PREFIX}constant_{name}"
        if name not in self.tensors:
            self._register(numpy_helper.from_array(np.asarray(value), name))
        return name

    def seen_as(self, tensor: str, name: str, dtype: int, shape: tuple[int, ...]) -> str:
        """The same bytes, wherever they are, as another type."""
        name = f"{PREFIX}{name}"
        if name not in self.tensors:
            other = onnx.TensorProto()
            other.CopyFrom(self.tensors[tensor])
            other.name, other.data_type = name, dtype
            other.ClearField("dims")
            other.dims.extend(shape)
            self._register(other)
        return name

    def leading(self, x: str) -> str:
        """A name for all axes but the last: two tensors with the same name have the same sizes there."""
        shape = self._shapes.get(x)
        return " ".join(map(str, shape[:-1])) if shape and all(shape) else f"of {x}"

    def is_matrix(self, x: str) -> bool:
        return len(self._shapes.get(x, ())) == 2

    def flat(self, x: str, width: int) -> str:
        """x as [rows, width]."""
        if self.is_matrix(x):
            return x
        shape = self.constant(f"rows_{width}", np.array([-1, width]))
        return self.shared("Reshape", [x, shape], name=f"{PREFIX}{x}_flat")

    def add_from_rows(self, operator: str, inputs: list[str], output: str, like: str, width: int) -> None:
        """An operator on rows, whose output has the axes of `like` again, but for the last."""
        if self.is_matrix(like):
            self.add(operator, inputs, output)
            return
        rows = self.add(operator, inputs, f"{PREFIX}{output}_on_rows")
        leading = self.shared("Shape", [like], key=("leading", self.leading(like)), end=-1)
        size = self.constant(f"width_{width}", np.array([width]))
        shape = self.shared("Concat", [leading, size], (leading, str(width)), axis=0)
        self.add("Reshape", [rows, shape], output)

    def write(self) -> None:
        """The new nodes in place of the old ones."""
        keep_needed(self._graph, self._nodes)

    def _register(self, tensor: onnx.TensorProto) -> None:
        self.tensors[tensor.name] = tensor
        self._graph.initializer.append(tensor)


def keep_needed(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Makes these the graph's nodes, in this order, without what no output needs: a runtime would compute that at every
    load."""
    kept = needed_nodes(nodes, graph.output)
    used = {name for node in kept for name in node.input} | {output.name for output in graph.output}
    tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(tensors)


def needed_nodes(nodes: Sequence[onnx.NodeProto], outputs: Iterable[onnx.ValueInfoProto]) -> list[onnx.NodeProto]:
    """Those without which one of the outputs would be missing, in their order."""
    needed = {output.name for output in outputs}
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]


def _dimensions(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    """Sizes and names of axes; an empty name where neither is known."""
    return tuple(axis.dim_param or axis.dim_value or "" for axis in value.type.tensor_type.shape.dim)
