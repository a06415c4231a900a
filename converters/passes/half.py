"""Half precision by types: the graph itself says what is computed in which.

Matrix products, attention and caches are in half; normalisations, softmax, log-softmax, sums and the search are in
float32. What stands between them (additions, activations, reshapes) follows its inputs, and float32 wins: a residual
that leaves a normalisation stays in float32. What nobody computes in bfloat16 is in float32, too. TensorRT is strongly
typed, so it computes exactly this; so does ONNX Runtime on a GPU. On the CPU it does not: `simulated` is for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from beamline.converters.version.weights import restore_full_precision
from beamline.serving.contract.manifest import StateKind, StateTensor

HALF_TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
FULL = ir.DataType.FLOAT

# Where the time goes. (DequantizeLinear: int8 weights become half, not float32. Recurrent operators stay in float32:
# TensorRT's parser mixes types in those that have lengths, and refuses its own work.)
_IN_HALF = frozenset({"MatMul", "Gemm", "Attention", "TensorScatter", "Conv", "Einsum", "DequantizeLinear"})
# What is as good in half as its inputs are: arithmetic, comparisons, and what only moves values.
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Floor", "Max", "Min", "Where", "Clip"}
_ACTIVATIONS = {"Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "Tanh", "Gelu", "Erf", "Elu", "Selu", "Swish"}
_COMPARISONS = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_LAYOUT = {"Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Concat", "Split", "Slice", "Expand", "Tile"}
_MOVES = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Pad", "Flatten", "ReverseSequence"}
_FOLLOWS = frozenset(_ARITHMETIC | _ACTIVATIONS | _COMPARISONS | _LAYOUT | _MOVES)
# What ONNX Runtime's CUDA provider (1.31) has no bfloat16 kernel for, or ONNX no bfloat16 version of. The CPU has none
# either, so a single one of them would keep a graph from loading. In float32 the inputs are the same numbers, and a
# comparison of them has the same result. (Clip is a function of comparisons there.)
_NOT_IN_BFLOAT16 = frozenset(
    _COMPARISONS | {"Floor", "Clip", "LeakyRelu", "Elu", "Selu", "Pad", "ReverseSequence", "Einsum", "DequantizeLinear"}
)
_FROM_TABLE = frozenset({"Gather", "GatherND"})  # of a constant: an embedding, which is kept in half
_NUMPY = {ir.DataType.FLOAT16: np.dtype(np.float16), ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}


def half_state(state: Sequence[StateTensor], precision: str) -> tuple[StateTensor, ...]:
    """Caches and memory in half. Recurrent states stay: they are small, and their errors would add up step by step."""
    return tuple(tensor.model_copy(update={"dtype": precision}) if _halved(tensor) else tensor for tensor in state)


def _halved(tensor: StateTensor) -> bool:
    return tensor.dtype == "float32" and tensor.kind is not StateKind.RECURRENT


def to_half(model: ir.Model, state: Sequence[StateTensor], precision: str) -> None:
    """Changes the graph. Its inputs and outputs that are caches or memory become half; all others stay as they are."""
    names = {tensor.name for tensor in state if _halved(tensor)}
    names |= {tensor.output for tensor in state if _halved(tensor)}
    restore_full_precision(model)
    _Lowering(model.graph, HALF_TYPES[precision], names).run()


class _Lowering:
    def __init__(self, graph: ir.Graph, half: ir.DataType, halved_names: set[str]) -> None:
        self._graph = graph
        self._half = half
        self._halved_names = halved_names
        self._made: dict[tuple[int, ir.DataType], ir.Value] = {}  # casts and constants, made once
        self._count = 0

    def run(self) -> None:
        for value in self._graph.inputs:
            if value.name in self._halved_names and value.dtype is FULL:
                value.type = ir.TensorType(self._half)
        for node in list(self._graph):
            self._lower(node)
        self._finish_outputs()
        for name, value in list(self._graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]

    def _lower(self, node: ir.Node) -> None:
        bodies = [body for attribute in node.attributes.values() for body in _graphs(attribute)]
        for body in bodies:
            self._keep_captured(node, body)
        wanted = FULL if bodies else self._wanted(node)
        for place, value in enumerate(node.inputs):
            if value is not None and _is_float(value) and not self._keeps(node, place):
                node.replace_input_with(place, self._as(value, wanted, node))
        if wanted is not FULL:
            for output in node.outputs:
                if output.dtype is FULL:
                    output.type = ir.TensorType(wanted)

    @staticmethod
    def _keeps(node: ir.Node, place: int) -> bool:
        """A cast's input may be anything."""
        return node.op_type in ("Cast", "Shape", "Size")

    def _wanted(self, node: ir.Node) -> ir.DataType:
        if self._half is ir.DataType.BFLOAT16 and node.op_type in _NOT_IN_BFLOAT16:
            return FULL
        if node.op_type in _IN_HALF:
            return self._half
        if node.op_type not in _FOLLOWS:
            return FULL
        floats = [value for value in node.inputs if value is not None and _is_float(value)]
        computed = [value for value in floats if ir.convenience.get_const_tensor(value) is None]
        if not computed:
            return self._half if floats and node.op_type in _FROM_TABLE else FULL
        return FULL if any(value.dtype is FULL for value in computed) else self._half

    def _as(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        if value.dtype is dtype:
            return value
        key = (id(value), dtype)
        if key not in self._made:
            constant = ir.convenience.get_const_tensor(value)
            made = self._cast(value, dtype, before) if constant is None else self._constant(constant, dtype)
            self._made[key] = made
        return self._made[key]

    def _cast(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """Right behind what it casts, so that everybody below can use it."""
        node = ir.node("Cast", [value], attributes={"to": dtype}, name=self._name("cast"))
        output = node.outputs[0]
        output.name, output.type, output.shape = f"{node.name}_out", ir.TensorType(dtype), value.shape
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return output

    def _constant(self, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        made = ir.Tensor(rounded(tensor.numpy(), dtype), name=self._name(tensor.name or "constant"), dtype=dtype)
        value = ir.Value(name=made.name, type=ir.TensorType(dtype), shape=ir.Shape(made.shape), const_value=made)
        self._graph.register_initializer(value)
        return value

    def _keep_captured(self, node: ir.Node, body: ir.Graph) -> None:
        """A loop's or branch's inside stays as it is; what it takes from outside is given to it in float32."""
        for inner in body.all_nodes():
            for place, value in enumerate(inner.inputs):
                if value is not None and value.dtype is self._half and _belongs(value, self._graph):
                    inner.replace_input_with(place, self._as(value, FULL, node))

    def _finish_outputs(self) -> None:
        for place, value in enumerate(list(self._graph.outputs)):
            wanted = self._half if value.name in self._halved_names else FULL
            if not _is_float(value) or value.dtype is wanted:
                continue
            name = value.name
            value.name = self._name(f"{name}_inner")
            node = ir.node("Cast", [value], attributes={"to": wanted}, name=self._name("cast"))
            output = node.outputs[0]
            output.name, output.type, output.shape = name, ir.TensorType(wanted), value.shape
            self._graph.append(node)
            self._graph.outputs[place] = output

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_lowered_{self._count}"


def rounded(values: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """A finite number stays finite: -1e9 in a mask becomes the smallest number, not -inf, which would poison a row."""
    if dtype is ir.DataType.FLOAT16:
        largest = np.finfo(np.float16).max
        values = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    return values.astype(_NUMPY[dtype]) if dtype in _NUMPY else values.astype(np.float32)


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (FULL, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _belongs(value: ir.Value, graph: ir.Graph) -> bool:
    producer = value.producer()
    return value in graph.inputs if producer is None else producer.graph is graph


def _graphs(attribute: ir.Attr) -> Iterable[ir.Graph]:
    if attribute.type is ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type is ir.AttributeType.GRAPHS else ()


# -- half precision where nothing computes in it ---------------------------------------------------------------------


def simulated(model: ir.Model, precision: str) -> None:
    """Changes a graph in half to float32 that is rounded behind every operator whose result is in half. What is too
    large for float16 becomes infinite there; sums inside an operator stay in float32, as cuBLAS keeps them.

    ONNX Runtime's CPU has no kernels for bfloat16 and few for float16: what it lacks in float16 it computes in float32,
    and drops the casts between, so that nothing would be rounded nor overflow. Casts to and fro in the graph itself it
    keeps."""
    graph, half = model.graph, HALF_TYPES[precision]
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.dtype is half:
            if value.const_value is not None:
                value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(FULL)
    for number, node in enumerate(list(graph)):
        if any(output.dtype is half for output in node.outputs):
            if node.op_type == "Cast":
                node.attributes["to"] = ir.AttrInt64("to", FULL.value)
            for place, output in enumerate(node.outputs):
                if output.dtype is half:
                    _round(graph, node, output, half, f"{number}_{place}")


def _round(graph: ir.Graph, node: ir.Node, output: ir.Value, half: ir.DataType, number: str) -> None:
    """Whoever reads this output, or gets it from the graph, reads it rounded."""
    output.type = ir.TensorType(FULL)
    uses = list(output.uses())
    down = ir.node("Cast", [output], attributes={"to": half}, name=f"down_{number}")
    up = ir.node("Cast", [down.outputs[0]], attributes={"to": FULL}, name=f"up_{number}")
    for each, dtype in ((down, half), (up, FULL)):
        each.outputs[0].name = f"{each.name}_out"
        each.outputs[0].type, each.outputs[0].shape = ir.TensorType(dtype), output.shape
    graph.insert_after(node, [down, up])
    for user, where in uses:
        user.replace_input_with(where, up.outputs[0])
    for place, result in enumerate(list(graph.outputs)):
        if result is output:
            output.name, up.outputs[0].name = f"{output.name}_unrounded", output.name
            graph.outputs[place] = up.outputs[0]
