"""What this machine can really run, found out without harm.

The order matters. `cudaGetDeviceCount` is safe anywhere; a TensorRT runtime made where there is no driver crashes the
process later; ONNX Runtime lists CUDA wherever it was compiled in, and falls back to the CPU in silence.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CudaDevice:
    number: int
    name: str
    capability: str  # "86"
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Probe:
    devices: tuple[CudaDevice, ...]
    reason: str  # why there is no device, or ""
    driver: str  # the CUDA version that the driver knows, or ""


def probe() -> Probe:
    try:
        from cuda.bindings import runtime as cuda
    except ImportError:
        return Probe((), "cuda-bindings is not installed", "")
    _, version = cuda.cudaDriverGetVersion()
    driver = f"{version // 1000}.{version % 1000 // 10}" if version else ""
    error, count = cuda.cudaGetDeviceCount()
    if error != cuda.cudaError_t.cudaSuccess:
        return Probe((), _explain(cuda, error), driver)
    devices = []
    for number in range(count):
        error, properties = cuda.cudaGetDeviceProperties(number)
        if error != cuda.cudaError_t.cudaSuccess:
            return Probe((), _explain(cuda, error), driver)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        devices.append(
            CudaDevice(
                number, name.rstrip("\0"), f"{properties.major}{properties.minor}", int(properties.totalGlobalMem)
            )
        )
    return Probe(tuple(devices), "" if devices else "the driver knows of no GPU", driver)


def _explain(cuda: object, error: object) -> str:
    code = cuda.cudaError_t  # type: ignore[attr-defined]
    if error == code.cudaErrorInsufficientDriver:
        return "there is no NVIDIA driver, or it is older than the CUDA libraries"
    if error == code.cudaErrorNoDevice:
        return "the driver knows of no GPU"
    _, text = cuda.cudaGetErrorString(error)  # type: ignore[attr-defined]
    return f"CUDA says: {text.decode() if isinstance(text, bytes) else text}"


def installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
