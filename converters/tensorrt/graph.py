"""A portable graph as TensorRT wants it: the cache's length is a number, and everything else stays symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from beamline.converters.tensorrt.loops import unfold_attention
from beamline.serving.contract.tensorrt_plans import PlanTensor
from beamline.serving.errors import ConversionError

CACHE_AXIS = "C"
_NAMES = {"float": "float32", "double": "float64"}  # ONNX's names that are not numpy's

Axes = tuple[str | int, ...]


@dataclass(frozen=True)
class Graph:
    """One graph in one bucket."""

    name: str
    path: Path  # where its weights are found from
    model: onnx.ModelProto
    cache_length: int | None
    inputs: tuple[PlanTensor, ...]  # with the cache's axis by name
    outputs: tuple[PlanTensor, ...]

    @property
    def aliases(self) -> dict[str, str]:
        """The outputs that are an input, appended to."""
        return {
            node.output[0]: node.input[0] for node in all_nodes(self.model.graph) if node.op_type == "TensorScatter"
        }

    def count(self, operator: str) -> int:
        return sum(node.op_type == operator for node in all_nodes(self.model.graph))


def load(name: str, path: Path, cache_length: int | None = None) -> Graph:
    """Without weights. The cache length is left out where the graph has no cache."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own, of several kinds
        raise ConversionError(f"{path} is not an ONNX graph: {error}") from error
    _drop_unread(model.graph)
    unfold_attention(model.graph)
    inputs, outputs = _tensors(model.graph.input), _tensors(model.graph.output)
    if not any(CACHE_AXIS in each.axes for each in inputs):
        return Graph(name, path, model, None, inputs, outputs)
    if cache_length is not None:
        for value in (*model.graph.input, *model.graph.output):
            for dimension in value.type.tensor_type.shape.dim:
                if dimension.dim_param == CACHE_AXIS:
                    dimension.Clear()
                    dimension.dim_value = cache_length
        del model.graph.value_info[:]  # they still speak of C
    return Graph(name, path, model, cache_length, inputs, outputs)


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Inputs that no node reads: a step need not look at all that its encoder made. TensorRT would call them unused, as
    it calls those that it ignores by mistake, and could not bind them."""
    read = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    for value in [value for value in graph.input if value.name not in read]:
        graph.input.remove(value)


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> tuple[PlanTensor, ...]:
    return tuple(PlanTensor(name=each.name, dtype=dtype_of(each), axes=axes_of(each)) for each in values)


def axes_of(value: onnx.ValueInfoProto) -> Axes:
    return tuple(dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def dtype_of(value: onnx.ValueInfoProto) -> str:
    name = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    return _NAMES.get(name, name)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Also those inside loops and branches."""
    yield from graph.node
    for body in bodies(graph):
        yield from body.node


def bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Of its loops and branches, and of those within them."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield body
                yield from bodies(body)
