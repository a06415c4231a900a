"""Graphs of a GPU that are run once per request, in memory of their own: encoder, prefill, scores, and models that
classify or embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import (
    Allocation,
    DeviceTensor,
    Gpu,
    GraphRunner,
    GraphSpec,
    Tensors,
    aligned,
    named_sizes,
    sizes_of,
    with_trim,
)

_LEAST_RESULTS = 64 * 2**10  # bytes of pinned memory


class GpuGraphs:
    """`Graphs` over what runs them there."""

    def __init__(self, device: Gpu, runner: GraphRunner) -> None:
        self._device = device
        self._runner = runner
        self.max_slots = runner.max_slots
        self._host: NDArray[np.uint8] | None = None

    def spec(self, graph: str) -> GraphSpec:
        return self._runner.spec(graph)

    def cache_length(self, entries: int) -> int:
        return self._runner.cache_length(entries)

    def most(self, graph: str, axis: str) -> int | None:
        return self._runner.most(graph, axis)

    def fetch(self, graph: str, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Waits for the results."""
        tensors, owner = self.run(graph, feeds)
        places, end = {}, 0
        for name in names:
            places[name] = end
            end += aligned(tensors[name].nbytes)
        host = self._host_memory(end)
        for name, begin in places.items():
            self._device.download(host[begin : begin + tensors[name].nbytes], tensors[name].address)
        self._device.wait(self._device.mark())
        del owner
        return {
            name: host[begin : begin + tensors[name].nbytes]
            .view(tensors[name].dtype)
            .reshape(tensors[name].shape)
            .copy()
            for name, begin in places.items()
        }

    def _host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Pinned, as a GPU copies to without a detour; kept for the next results."""
        if self._host is None or len(self._host) < nbytes:
            self._host = self._device.pinned(max(_LEAST_RESULTS, 1 << (nbytes - 1).bit_length()))
        return self._host

    def run(
        self, graph: str, feeds: Mapping[str, NDArray[Any]], bound: Mapping[str, DeviceTensor] | None = None
    ) -> tuple[Tensors, object]:
        """Waits for nothing."""
        bound = bound or {}
        spec = self._runner.spec(graph)
        shapes = {name: array.shape for name, array in feeds.items()} | {name: t.shape for name, t in bound.items()}
        sizes = named_sizes(spec.inputs, shapes)
        wanted = {
            each.name: (each.dtype, sizes_of(each.axes, sizes))
            for each in (*spec.inputs, *spec.outputs)
            if each.name not in bound
        }
        tensors, owner = self._memory_for(wanted)
        for each in spec.inputs:
            if each.name not in bound:
                self._device.upload(tensors[each.name].address, np.ascontiguousarray(feeds[each.name]))
        bound_tensors = {**tensors, **bound}
        with_trim(self._device, lambda: self._launch(graph, bound_tensors))
        return tensors, owner

    def _launch(self, graph: str, tensors: Tensors) -> None:
        launch = self._runner.prepare(graph, tensors)
        self._device.enter()  # to open a graph that was not needed before may have left another one
        launch()

    def _memory_for(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Tensors, object]:
        places, end = {}, 0
        for name, (dtype, shape) in wanted.items():
            places[name] = end
            end += aligned(DeviceTensor(0, dtype, shape).nbytes)
        owner = Allocation(self._device, end)
        tensors = {
            name: DeviceTensor(owner.address + places[name], dtype, shape) for name, (dtype, shape) in wanted.items()
        }
        return tensors, owner
