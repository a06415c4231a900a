"""Graphs that are run once per request, in memory of their own: encoder, prompts, scores, and models that only read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import Device, DeviceTensor, GraphRunner, TensorSpec, aligned, sizes_of
from beamline.serving.backends.padding import pad
from beamline.serving.contract.backend import Floats
from beamline.serving.contract.manifest import PooledManifest
from beamline.serving.errors import ModelError

Tensors = dict[str, DeviceTensor]


class _Owner:
    """Device memory that lives as long as somebody points to this."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.address = device.allocate(aligned(max(1, nbytes)))
        weakref.finalize(self, device.free, self.address)


class OnceRunner:
    def __init__(self, device: Device, runner: GraphRunner) -> None:
        self._device = device
        self._runner = runner

    def fetch(self, graph: str, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Waits for the results."""
        tensors, owner = self.run(graph, feeds)
        arrays = {}
        for name in names:
            arrays[name] = np.empty(tensors[name].shape, tensors[name].dtype)
            self._device.download(arrays[name], tensors[name].address)
        self._device.wait(self._device.mark())
        del owner
        return arrays

    def run(
        self, graph: str, feeds: Mapping[str, NDArray[Any]], bound: Mapping[str, DeviceTensor] | None = None
    ) -> tuple[Tensors, object]:
        """Inputs and outputs in memory of their own, but for what is bound elsewhere already. Waits for nothing; the
        memory lives as long as the second result."""
        bound = bound or {}
        spec = self._runner.spec(graph)
        shapes = {name: array.shape for name, array in feeds.items()} | {name: t.shape for name, t in bound.items()}
        sizes = named_sizes(spec.inputs, shapes)
        wanted = {
            each.name: (each.dtype, sizes_of(each.axes, sizes))
            for each in (*spec.inputs, *spec.outputs)
            if each.name not in bound
        }
        tensors, owner = self.memory_for(wanted)
        for each in spec.inputs:
            if each.name not in bound:
                self._device.upload(tensors[each.name].address, np.ascontiguousarray(feeds[each.name]))
        self._runner.prepare(graph, {**tensors, **bound})()
        return tensors, owner

    def memory_for(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Tensors, object]:
        """Zeroed."""
        places, end = {}, 0
        for name, (dtype, shape) in wanted.items():
            places[name] = end
            end += aligned(DeviceTensor(0, dtype, shape).nbytes)
        owner = _Owner(self._device, end)
        tensors = {
            name: DeviceTensor(owner.address + places[name], dtype, shape) for name, (dtype, shape) in wanted.items()
        }
        return tensors, owner


class DevicePooled:
    """A model that classifies or embeds, on a GPU: one graph, run once per batch."""

    def __init__(self, manifest: PooledManifest, device: Device, runner: GraphRunner, rows: int) -> None:
        check_slots(runner, rows)
        self._once = OnceRunner(device, runner)
        self._outputs = [each.name for each in runner.spec("pooled").outputs]
        self._pad_id = manifest.pad_id

    def run(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Floats]:
        ids, mask = pad(sources, self._pad_id)
        return self._once.fetch("pooled", {"source": ids, "source_mask": mask}, self._outputs)


def check_slots(runner: GraphRunner, slots: int) -> None:
    if runner.max_slots is not None and slots > runner.max_slots:
        raise ModelError(
            f"the plans hold {runner.max_slots} requests at once: serve with --max-slots {runner.max_slots}, "
            f"or run `beamline build --plan-slots {slots}`"
        )


def named_sizes(specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes of the axes that have a name."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for axis, size in zip(spec.axes, shapes.get(spec.name, ()), strict=False):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise ModelError(f"{spec.name} has {size} along {axis}, where others have {sizes[axis]}")
    return sizes
