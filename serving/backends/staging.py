"""Small tensors that go between host and GPU, all in one piece of memory, so that one copy brings all of them over."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamline.serving.backends.device import DeviceTensor, Gpu, TensorSpec, aligned, item_bytes, sizes_of


class Staging:
    """Room on the device, and twice on the host: while one of the host's is read, the device fills the other."""

    def __init__(self, device: Gpu, specs: Iterable[TensorSpec], nbytes: int) -> None:
        self._specs = tuple(specs)
        self._device = device
        self.nbytes = aligned(max(1, nbytes))
        self.address = device.allocate(self.nbytes)
        weakref.finalize(self, device.free, self.address)
        self._host = [device.pinned(self.nbytes) for _ in range(2)]

    @staticmethod
    def bytes_for(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> int:
        return sum(aligned(math.prod(sizes_of(spec.axes, sizes)) * item_bytes(spec.dtype)) for spec in specs)

    def tensors(self, sizes: Mapping[str, int]) -> dict[str, DeviceTensor]:
        """Where each lies at these sizes. The same sizes give the same addresses."""
        found, offset = {}, 0
        for spec in self._specs:
            found[spec.name] = DeviceTensor(self.address + offset, spec.dtype, sizes_of(spec.axes, sizes))
            offset += aligned(found[spec.name].nbytes)
        return found

    def upload(self, tensors: Mapping[str, DeviceTensor], values: Mapping[str, NDArray[Any]], turn: int) -> None:
        host, end = self._host[turn], 0
        for name, tensor in tensors.items():
            assert values[name].shape == tensor.shape, (name, values[name].shape, tensor.shape)
            view = self._view(host, tensor)
            view[...] = values[name]
            end = tensor.address - self.address + tensor.nbytes
        if end:
            self._device.upload(self.address, host[:end])

    def download(self, tensors: Mapping[str, DeviceTensor], turn: int) -> dict[str, NDArray[Any]]:
        """Arrays that hold the values when a later mark is reached, until the next turn but one."""
        host = self._host[turn]
        end = max((tensor.address - self.address + tensor.nbytes for tensor in tensors.values()), default=0)
        if end:
            self._device.download(host[:end], self.address)
        return {name: self._view(host, tensor) for name, tensor in tensors.items()}

    def _view(self, host: NDArray[np.uint8], tensor: DeviceTensor) -> NDArray[Any]:
        offset = tensor.address - self.address
        return host[offset : offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
