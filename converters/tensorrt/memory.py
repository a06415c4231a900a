"""What plans will need of a GPU, about, before they are built: a build takes minutes, and a GPU has what it has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from beamline.converters.tensorrt.graph import Graph, bodies
from beamline.converters.tensorrt.profiles import Extent, profile, worst_case
from beamline.serving.contract.manifest import AnyManifest, Manifest

MIB = 2**20
# tensorrt-rtx 1.7 asks for 1.2 to 1.3 times what is alive at once of a graph's intermediate values, and for 8 MiB.
_SPARE = 1.25
_LEAST_ACTIVATIONS = 8 * MIB
_CODE_OF_A_NODE = 36 * 2**10  # in a plan, beside its weights
_CODE_OF_A_LOOP = 2 * MIB
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_LOOPS = frozenset({*_GATES, "Scan", "Loop"})


@dataclass(frozen=True, slots=True)
class PlanNeed:
    title: str
    plan: int  # bytes: weights and code
    activations: int


@dataclass(frozen=True, slots=True)
class Needs:
    plans: tuple[PlanNeed, ...]
    arenas: int  # of all slots, at the longest cache

    @property
    def activations(self) -> int:
        """Plans run one after the other, in the same memory."""
        return max((plan.activations for plan in self.plans), default=0)

    def lines(self) -> list[str]:
        plans = sum(plan.plan for plan in self.plans)
        total = plans + self.activations + self.arenas
        return [
            *(f"{each.title}: plan {_mib(each.plan)}, activations {_mib(each.activations)}" for each in self.plans),
            f"all of it on a GPU: {_mib(total)} (plans {_mib(plans)}, activations, which they share, "
            f"{_mib(self.activations)}, arenas {_mib(self.arenas)})",
        ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def needs(graphs: Iterable[Graph], manifest: AnyManifest, sizes: Mapping[str, Extent]) -> Needs:
    plans = tuple(_of_plan(graph, sizes) for graph in graphs)
    arenas = arena_bytes(manifest, sizes["B"].largest, worst_case(manifest)) if isinstance(manifest, Manifest) else 0
    return Needs(plans, arenas)


def _title(graph: Graph) -> str:
    return graph.name if graph.cache_length is None else f"{graph.name}, cache {graph.cache_length}"


def arena_bytes(manifest: Manifest, slots: int, cache: int) -> int:
    """What the model's state takes with all slots at this cache length."""
    axes = {"B": slots, "K": manifest.limits.max_beam_size, "C": cache, "S": manifest.limits.max_source_length}
    return sum(
        math.prod(axes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)
        * _state_item_bytes(tensor.dtype)
        for tensor in manifest.state
    )


def _state_item_bytes(dtype: str) -> int:
    """By numpy's name, or bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _of_plan(graph: Graph, sizes: Mapping[str, Extent]) -> PlanNeed:
    """Of the largest shapes that it is built for. What is inside a loop or a branch is not looked at."""
    inferred = onnx.shape_inference.infer_shapes(_at_its_largest(graph, sizes), data_prop=True).graph
    bytes_of = {value.name: _value_bytes(value.type.tensor_type) for value in inferred.value_info}
    bytes_of |= {each.name: math.prod(each.dims) * _item_bytes(each.data_type) for each in inferred.initializer}
    constants = _constants(inferred)
    running = [node for node in inferred.node if not constants.issuperset(node.output)]
    read = constants.intersection(name for node in running for name in node.input)
    for node in inferred.node:
        if node.op_type == "DequantizeLinear":  # a weight of few bits stays one
            bytes_of[node.output[0]] = bytes_of.get(node.input[0], 0)
    weights = sum(bytes_of.get(name, 0) for name in read)
    within = {name: size for name, size in bytes_of.items() if name not in constants}
    values = {value.name: value.type.tensor_type for value in (*inferred.input, *inferred.output, *inferred.value_info)}
    alive = _most_alive(running, within, values)
    code = _CODE_OF_A_NODE * len(running) + _CODE_OF_A_LOOP * sum(node.op_type in _LOOPS for node in running)
    return PlanNeed(_title(graph), int(weights) + code, max(_LEAST_ACTIVATIONS, int(_SPARE * alive)))


def _constants(graph: onnx.GraphProto) -> set[str]:
    """Weights, and what is computed from them alone: TensorRT does that when it builds, so a weight that is stored in
    few bits and widened is in the plan as it is wide, and one that is used in two ways twice."""
    found = {each.name for each in graph.initializer}
    for node in graph.node:
        if node.input and found.issuperset(name for name in node.input if name):
            found.update(node.output)
    return found


def _most_alive(
    nodes: Sequence[onnx.NodeProto], bytes_of: Mapping[str, float], values: Mapping[str, onnx.TypeProto.Tensor]
) -> float:
    """Bytes of intermediate values that are needed at once. `values`: also the graph's own inputs and outputs."""
    last_use = {name: place for place, node in enumerate(nodes) for name in node.input}
    alive = most = 0.0
    for place, node in enumerate(nodes):
        alive += sum(bytes_of.get(name, 0) for name in node.output)
        most = max(most, alive + _work_bytes(node, values))
        alive -= sum(bytes_of.get(name, 0) for name in set(node.input) if last_use[name] == place)
    return most


def _work_bytes(node: onnx.NodeProto, values: Mapping[str, onnx.TypeProto.Tensor]) -> float:
    """What a node needs beside its inputs and outputs. Where attention has no fused kernel, as in float32, what it is
    made of instead copies keys and values, wherever they are, and has the scores of each pair: [B, heads, Q, keys]. A
    recurrent layer has the gates of all positions: [S, B, gates]."""
    if node.op_type not in ("Attention", *_GATES):
        return 0
    first = values[node.input[0]]
    rows = math.prod(each.dim_value for each in first.shape.dim[:-1]) * _item_bytes(first.elem_type)
    if node.op_type == "Attention":
        keys, content = (values[name] for name in node.input[1:3])
        return rows * keys.shape.dim[-2].dim_value + _value_bytes(keys) + _value_bytes(content)
    hidden = next(each.i for each in node.attribute if each.name == "hidden_size")
    return rows * _GATES[node.op_type] * hidden


def _at_its_largest(graph: Graph, sizes: Mapping[str, Extent]) -> onnx.ModelProto:
    largest = {name: each.largest for name, each in profile(graph, sizes).items()}
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.value_info[:]  # they are about axes by name
    axes: dict[str, int] = {}
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, largest.get(value.name, ()), strict=False):
            axes[dimension.dim_param] = size
            dimension.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in _inside(model.graph):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in axes:
                dimension.dim_value = axes[dimension.dim_param]
    return model


def _inside(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """What is declared within its loops and branches, by the names of axes."""
    for body in bodies(graph):
        yield from (*body.input, *body.output, *body.value_info)


def _value_bytes(tensor: onnx.TypeProto.Tensor) -> float:
    sizes = [dimension.dim_value for dimension in tensor.shape.dim]
    return math.prod(sizes) * _item_bytes(tensor.elem_type)


def _item_bytes(kind: int) -> float:
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        return 0.5
    return helper.tensor_dtype_to_np_dtype(kind).itemsize
