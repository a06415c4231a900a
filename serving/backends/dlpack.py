"""Tensors of our own memory for ONNX Runtime, by DLPack: the one way from an address to a value that copies nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import onnxruntime as ort

from beamline.serving.backends.device import DeviceTensor

# (code, bits), as dlpack.h numbers them
_TYPES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16)}
_PLACES = {"cpu": 1, "cuda": 2}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: dict[int, object] = {}  # what values point to, by its address, until ONNX Runtime has no copy of them any more


def _forget(managed: int, alive: dict[int, object] = _alive) -> None:
    alive.pop(managed, None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)
_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def can_be_wrapped(dtype: str) -> bool:
    return dtype in _TYPES


def wrapped(tensor: DeviceTensor, place: str, device: int) -> ort.OrtValue:
    """The memory is not kept by it."""
    shape = (ctypes.c_int64 * len(tensor.shape))(*tensor.shape)
    at, data_type = _Device(_PLACES[place], device), _DataType(*_TYPES[tensor.dtype], 1)
    deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    managed = _Managed(_Tensor(tensor.address, at, len(shape), data_type, shape, None, 0), None, deleter)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape)
    return ort.OrtValue.from_dlpack(_capsule(address, b"dltensor", None))
