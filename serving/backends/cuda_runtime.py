"""CUDA's runtime, as ONNX Runtime has loaded it. We use the driver; this is for what its provider leaves there."""

from __future__ import annotations

import ctypes
import functools
import os

import onnxruntime as ort


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    name = f"libcudart.so.{str(ort.cuda_version).partition('.')[0]}"
    try:
        return ctypes.CDLL(name, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # this ONNX Runtime is not one for CUDA, or has not loaded it
        return None


def forget_last_error() -> None:
    """Of this thread's calls. Where a run fails, ONNX Runtime 1.31 waits for the device, also within a recording, where
    CUDA refuses that, and looks no further. The next run's first kernel that asks for the last error would find it, and
    fail for it."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()
