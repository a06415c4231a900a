"""A portable graph as TensorRT wants it: the cache's length is a number, and everything else stays symbolic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from serving.errors import ConversionError

CACHE_AXIS = "C"
_NAMES = {"float": "float32", "double": "float64"}  # ONNX's names that are not numpy's

Axes = tuple[str | int, ...]


@dataclass(frozen=True)
class GraphInput:
    name: str
    dtype: str
    axes: Axes


@dataclass(frozen=True)
class Graph:
    """One graph in one bucket."""

    name: str
    path: Path  # where its weights are found from
    model: onnx.ModelProto
    cache_length: int | None

    @property
    def inputs(self) -> list[GraphInput]:
        return [GraphInput(value.name, dtype_of(value), axes_of(value)) for value in self.model.graph.input]

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
    if not has_cache(model):
        return Graph(name, path, model, None)
    if cache_length is not None:
        for value in (*model.graph.input, *model.graph.output):
            for dimension in value.type.tensor_type.shape.dim:
                if dimension.dim_param == CACHE_AXIS:
                    dimension.Clear()
                    dimension.dim_value = cache_length
        del model.graph.value_info[:]  # they still speak of C
    return Graph(name, path, model, cache_length)


def has_cache(model: onnx.ModelProto) -> bool:
    return any(CACHE_AXIS in axes_of(value) for value in model.graph.input)


def axes_of(value: onnx.ValueInfoProto) -> Axes:
    return tuple(dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim)


def dtype_of(value: onnx.ValueInfoProto) -> str:
    name = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    return _NAMES.get(name, name)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Also those inside loops and branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from all_nodes(body)
