"""A version on a device: the backend that runs it there."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path

from serving.backends.base import Backend
from serving.backends.probe import CudaDevice
from serving.devices import Choice
from serving.errors import ModelError
from serving.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    backend: Backend
    cache_buckets: tuple[int, ...] | None = None  # the only lengths that it can run, where not every one


def make_backend(
    folder: Path, manifest: Manifest, threads: int, choice: Choice, device: CudaDevice | None, options: dict[str, str]
) -> Made:
    """`options` are those of ONNX Runtime's CUDA provider."""
    if device is None:
        from serving.backends.onnxruntime import OnnxRuntimeBackend

        if manifest.precision == "bfloat16":
            raise ModelError(f"{folder} is in bfloat16, which only GPUs compute; convert it to float32 for the CPU")
        return Made(OnnxRuntimeBackend(folder, manifest, threads))
    if choice.kind == "tensorrt":
        return _tensorrt(folder, manifest, device, str(choice.library))
    return _cuda(folder, manifest, device, options)


def _tensorrt(folder: Path, manifest: Manifest, device: CudaDevice, library: str) -> Made:
    from serving.backends.cuda import CudaDevice as Gpu
    from serving.backends.device_backend import DeviceBackend
    from serving.backends.tensorrt import LibraryRuntime, TensorRtRunner

    gpu = Gpu(device.number)
    runtime = LibraryRuntime(importlib.import_module(library), library, gpu.stream, device.capability)
    runner = TensorRtRunner(folder, manifest, gpu, runtime)
    return Made(DeviceBackend(manifest, gpu, runner), runner.plans.cache_buckets)


def _cuda(folder: Path, manifest: Manifest, device: CudaDevice, options: dict[str, str]) -> Made:
    from serving.backends.cuda import CudaDevice as Gpu
    from serving.backends.device_backend import DeviceBackend
    from serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner

    gpu = Gpu(device.number)
    return Made(
        DeviceBackend(manifest, gpu, OnnxRuntimeCudaRunner(folder, manifest, device.number, gpu.stream, options))
    )
