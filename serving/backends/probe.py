"""What this machine can really run, found out without harm.

The order matters. CUDA's driver answers anywhere, or is not there; a TensorRT runtime made where there is no driver
crashes the process later; ONNX Runtime lists CUDA wherever it was compiled in, and falls back to the CPU in silence.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class CudaDevice:
    number: int
    name: str
    capability: str  # "86"
    memory_bytes: int
    uuid: str = ""  # as NVIDIA's tools write it, but without their "GPU-" or, of a part of a GPU, "MIG-"

    @property
    def alone(self) -> str:
        """What stands before a command that works on the first GPU that it sees, so that this is the one. By its UUID:
        numbers are not the machine's where CUDA_VISIBLE_DEVICES was set before."""
        named = f"GPU-{self.uuid}" if self.uuid else self.number
        return f"CUDA_VISIBLE_DEVICES={named} " if self.number else ""


@dataclass(frozen=True, slots=True)
class Probe:
    devices: tuple[CudaDevice, ...]
    reason: str  # why there is no device, or ""
    driver: str  # the CUDA version that the driver knows, or ""


class _Refused(Exception):
    pass


def probe() -> Probe:
    try:
        from cuda.bindings import driver as cuda
    except ImportError:
        return Probe((), "cuda-bindings is not installed", "")
    version = ""
    try:
        _ask(cuda, cuda.cuInit(0))
        number = _ask(cuda, cuda.cuDriverGetVersion())
        version = f"{number // 1000}.{number % 1000 // 10}"
        devices = tuple(_device(cuda, each) for each in range(_ask(cuda, cuda.cuDeviceGetCount())))
    except _Refused as error:
        return Probe((), str(error), version)
    except RuntimeError:  # the library itself is missing
        return Probe((), "there is no NVIDIA driver", "")
    return Probe(devices, "" if devices else "the driver knows of no GPU", version)


def _device(cuda: Any, number: int) -> CudaDevice:
    device = _ask(cuda, cuda.cuDeviceGet(number))
    name = _ask(cuda, cuda.cuDeviceGetName(128, device))
    wanted = cuda.CUdevice_attribute
    major = _ask(cuda, cuda.cuDeviceGetAttribute(wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = _ask(cuda, cuda.cuDeviceGetAttribute(wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    memory = int(_ask(cuda, cuda.cuDeviceTotalMem(device)))
    name = name.decode().split("\0")[0]
    return CudaDevice(number, name, f"{major}{minor}", memory, str(UUID(bytes=_uuid(cuda, device))))


def _uuid(cuda: Any, device: Any) -> bytes:
    return bytes(_ask(cuda, cuda.cuDeviceGetUuid(device)).bytes)


def _ask(cuda: Any, answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error == cuda.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    if error == cuda.CUresult.CUDA_ERROR_NO_DEVICE:
        raise _Refused("the driver knows of no GPU")
    _, text = cuda.cuGetErrorString(error)
    raise _Refused(f"CUDA says: {text.decode() if isinstance(text, bytes) else text}")


def installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
