"""The weights of a version on a GPU, once for all of its graphs: by itself, each session takes a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from beamline.serving.backends.device import Allocation, DeviceTensor, Gpu, aligned
from beamline.serving.backends.dlpack import can_be_wrapped, wrapped
from beamline.serving.backends.onnxruntime_tensors import dtype_of

if TYPE_CHECKING:
    import onnx

_LEAST_BYTES = 4096  # of what is worth sharing
# Operators that read a matrix as it is, and at which place. ONNX Runtime computes with others when it loads a graph
# (transposes, casts, scales); of what it was given from outside it would compute that anew in every run.
_READS = {("MatMul", 1), ("Gemm", 1), ("Gather", 0)}


class _Place(NamedTuple):
    """In the file."""

    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


class DeviceWeights:
    """Goes after the sessions that use it."""

    def __init__(self, device: Gpu, place: str, number: int) -> None:
        self._device = device
        self._place = place
        self._number = number
        self._values: dict[_Place, ort.OrtValue] = {}
        self._memory: list[Allocation] = []

    def hand_over(self, model: onnx.ModelProto, content: NDArray[np.uint8], options: ort.SessionOptions) -> None:
        """To a session of this model. `content` is the file's."""
        found = dict(_shared(model.graph))
        self._bring_over({place for place in found.values() if place not in self._values}, content)
        for name, place in found.items():
            options.add_initializer(name, self._values[place])

    def _bring_over(self, places: set[_Place], content: NDArray[np.uint8]) -> None:
        if not places:
            return
        memory = Allocation(self._device, sum(aligned(place.length) for place in places))
        address, values = memory.address, dict[_Place, ort.OrtValue]()
        for place in sorted(places):
            self._device.upload(address, content[place.offset : place.offset + place.length])
            tensor = DeviceTensor(address, place.dtype, place.shape)
            values[place] = wrapped(tensor, self._place, self._number)
            address += aligned(place.length)
        self._device.wait(self._device.mark())
        self._memory.append(memory)
        self._values |= values


def _shared(graph: onnx.GraphProto) -> Iterator[tuple[str, _Place]]:
    """Matrices by their names."""
    inside = {name for node in graph.node for each in node.attribute if each.HasField("g") for name in _names(each.g)}
    uses: dict[str, set[tuple[str, int]]] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            uses.setdefault(name, set()).add((node.op_type, place))
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        length, dtype = int(entries.get("length", 0)), dtype_of(tensor.data_type)
        if length < _LEAST_BYTES or dtype is None or not can_be_wrapped(dtype) or tensor.name in inside:
            continue
        if uses.get(tensor.name, set()) <= _READS:
            yield tensor.name, _Place(int(entries.get("offset", 0)), length, dtype, tuple(tensor.dims))


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """That a branch or a body of a loop reads."""
    for node in graph.node:
        yield from node.input
        for each in node.attribute:
            if each.HasField("g"):
                yield from _names(each.g)
