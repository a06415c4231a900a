"""What ONNX Runtime's CUDA provider leaves to the CPU: arithmetic on sizes, on purpose, or a part of the model.

`Shape` reads no numbers, and its result lies in the host's memory: that is where sizes are added, joined and cast
before an operator on the GPU takes them. A part of the model on the CPU, because there is no CUDA kernel for it, is
another thing: what it reads is fetched from the GPU in every run, and the host waits for it. So an operator may be on
the CPU where it handles nothing but sizes:

- everything that it reads is a small constant, a size (from `Shape` or `Size` on the GPU), or made of those on the CPU;
- and it gives about as many numbers as it takes: no `Expand`, `Range` or `ConstantOfShape`, which make whole tensors.

The type says nothing (a size is cast to float for a division), and nor does the operator alone: there is `Mul` of
sizes, and `Mul` of activations that has no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx
import onnxruntime as ort

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
RECORD = "session.record_ep_graph_assignment_info"  # must be "1" for a session that is asked

# The provider has kernels of these for every type: where one is on the CPU, that is its choice, and the data is small.
_LAYOUT = frozenset(
    {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose"}
    | {"Concat", "Split", "Slice", "Gather"}
)
_ARITHMETIC = frozenset(
    {"Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Floor", "Ceil", "Sqrt", "Reciprocal", "Where"}
    | {"ReduceProd", "ReduceSum", "ReduceMin", "ReduceMax"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"}
)
_OF_SIZES = _LAYOUT | _ARITHMETIC
_MEASURES = frozenset({"Shape", "Size"})
_SMALL = 100  # numbers in a constant; a shape has a few


@dataclass(frozen=True, slots=True)
class Placed:
    """A node of the graph as ONNX Runtime has rewritten it."""

    name: str
    op_type: str
    on_cpu: bool
    domain: str = ""


def placement(session: ort.InferenceSession) -> list[Placed]:
    return [
        Placed(node.name, node.op_type, part.ep_name == CPU, node.domain)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def misplaced(graph: onnx.GraphProto, placed: Iterable[Placed]) -> list[Placed]:
    """What is on the CPU and handles more than sizes. `graph` is the one that the session was made from."""
    placed = list(placed)
    on_cpu = {node.name: node for node in placed if node.on_cpu}
    sizes = _Sizes(on_cpu, {node.name for node in placed if not node.on_cpu})
    sizes.visit(graph)
    # What the runtime wrote itself can't be followed: it may move sizes (`Gather` behind a `Shape`, say), no more.
    written = [node for node in placed if node.on_cpu and (not node.name or node.name not in sizes.seen)]
    return [on_cpu[name] for name in sizes.wrong] + [node for node in written if not _is(node, _LAYOUT)]


class _Sizes:
    """Follows sizes through a graph, whose nodes are in the order of computation."""

    def __init__(self, on_cpu: Iterable[str], on_gpu: Iterable[str]) -> None:
        self._on_cpu, self._on_gpu = frozenset(on_cpu), frozenset(on_gpu)
        self._values = {""}  # an input that is left out
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def visit(self, graph: onnx.GraphProto) -> None:
        self._values.update(tensor.name for tensor in graph.initializer if _is_small(tensor))
        for node in graph.node:
            self.seen.add(node.name)
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    self.visit(body)
            if self._gives_sizes(node):
                self._values.update(node.output)
            elif node.name and node.name in self._on_cpu:
                self.wrong.append(node.name)

    def _gives_sizes(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Constant":
            return all(not attribute.HasField("t") or _is_small(attribute.t) for attribute in node.attribute)
        if node.op_type in _MEASURES and node.name not in self._on_cpu:
            return True  # on the CPU it would be given the whole tensor
        if node.name in self._on_gpu:
            return False  # computed there, whatever from
        # On the CPU, or nowhere: folded into a constant, or merged with a node that computes the same.
        return _is(node, _OF_SIZES | _MEASURES) and self._values.issuperset(node.input)


def _is(node: Placed | onnx.NodeProto, operators: frozenset[str]) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in operators


def _is_small(tensor: onnx.TensorProto) -> bool:
    count = 1
    for size in tensor.dims:
        count *= size
    return count <= _SMALL


def describe(nodes: Sequence[Placed]) -> str:
    """By operator, with the name of one of each: `2 x Elu (elu_1)`."""
    counts = Counter(node.op_type for node in nodes)
    first = {node.op_type: node.name for node in reversed(nodes)}
    return ", ".join(
        f"{count} x {kind}{f' ({first[kind]})' if first[kind] else ''}" for kind, count in sorted(counts.items())
    )
