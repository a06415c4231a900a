"""A version on a device: the backend that runs it there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from beamline.serving.backends.device import Gpu, GraphRunner
from beamline.serving.backends.pooled import PooledGraphBackend
from beamline.serving.backends.probe import CudaDevice
from beamline.serving.backends.selection import Choice
from beamline.serving.backends.weights import Weights
from beamline.serving.contract.backend import Backend, PooledBackend
from beamline.serving.contract.manifest import AnyManifest, Manifest, PooledManifest
from beamline.serving.errors import ModelError


@dataclass(frozen=True, slots=True)
class Made:
    backend: Backend
    cache_buckets: tuple[int, ...] | None = None  # the only lengths that it can run, where not every one


def make_backend(
    folder: Path,
    manifest: Manifest,
    threads: int,
    choice: Choice,
    device: CudaDevice | None,
    options: dict[str, str],
    shortlist: bool = False,
    weights: Weights | None = None,
) -> Made:
    """`options` are those of ONNX Runtime's CUDA provider. `weights`: where several backends share them."""
    if device is None:
        from beamline.serving.backends.cpu import CpuBackend

        if manifest.precision == "bfloat16":
            raise ModelError(f"{folder} is in bfloat16, which only GPUs compute; convert it to float32 for the CPU")
        return Made(CpuBackend(folder, manifest, threads, shortlist, weights))
    if shortlist:
        raise ModelError(f"{folder} can't have a shortlist on a GPU: serve it on the CPU, or without")
    from beamline.serving.backends.gpu import GpuBackend

    gpu, runner, buckets = _on_gpu(folder, manifest, choice, device, options)
    return Made(GpuBackend(manifest, gpu, runner), buckets)


def make_pooled(
    folder: Path, manifest: PooledManifest, threads: int, choice: Choice, rows: int, options: dict[str, str]
) -> PooledBackend:
    """On the CPU, or on the first of the devices that were chosen."""
    if not choice.devices:
        from beamline.serving.backends.onnxruntime_cpu import CpuGraphs

        return PooledGraphBackend(manifest, CpuGraphs(folder, manifest, threads), rows)
    from beamline.serving.backends.one_shot import GpuGraphs

    gpu, runner, _ = _on_gpu(folder, manifest, choice, choice.devices[0], options)
    return PooledGraphBackend(manifest, GpuGraphs(gpu, runner), rows)


def _on_gpu(
    folder: Path, manifest: AnyManifest, choice: Choice, device: CudaDevice, options: dict[str, str]
) -> tuple[Gpu, GraphRunner, tuple[int, ...] | None]:
    from beamline.serving.backends.cuda import CudaDevice as CudaGpu

    gpu = CudaGpu(device.number)
    if choice.kind == "tensorrt":
        from beamline.serving.backends.tensorrt import LibraryRuntime, TensorRtRunner

        library = str(choice.library)
        module = importlib.import_module(library)
        runtime = LibraryRuntime(module, library, device.number, gpu.stream, device.capability)
        plans = TensorRtRunner(folder, manifest, gpu, runtime, device.alone)
        return gpu, plans, plans.plans.cache_buckets
    from beamline.serving.backends.onnxruntime_cuda import OnnxRuntimeCudaRunner

    return gpu, OnnxRuntimeCudaRunner(folder, manifest, device.number, gpu.stream, options, owner=gpu), None
