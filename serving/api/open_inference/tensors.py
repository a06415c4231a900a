"""Tensors of the open inference protocol: as typed contents, or raw and little-endian, in both directions."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.errors import InvalidRequest

INTEGERS = {"INT32": "<i4", "INT64": "<i8", "UINT32": "<u4"}
_CONTENTS = {
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
}
_DATATYPES = {"text": "BYTES", "token_ids": "INT32, INT64 or UINT32"}  # of the inputs that there are
_NUMBERS = {**INTEGERS, "FP32": "<f4"}
_LENGTH = struct.Struct("<I")
# Beyond any request that a model could take; they are checked before anything is allocated.
_MAX_TENSORS = 8
_MAX_AXES = 4
_MAX_ELEMENTS = {"INT32": 2**22, "INT64": 2**22, "UINT32": 2**22, "BYTES": 2**16}  # the datatypes of inputs


@dataclass(frozen=True, slots=True)
class InputTensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    bytes_values: tuple[bytes, ...] = ()  # of BYTES
    int_values: tuple[int, ...] = ()  # of the integer types


def read_inputs(request: oip.ModelInferRequest) -> list[InputTensor]:
    raw = request.raw_input_contents
    if len(request.inputs) > _MAX_TENSORS:
        raise InvalidRequest(f"the request has {len(request.inputs)} inputs; at most {_MAX_TENSORS} are allowed")
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents; there must be one "
            "for each, or none at all"
        )
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) != len(names):
        raise InvalidRequest("the request has two inputs with one name")
    return [_read(tensor, raw[index] if raw else None) for index, tensor in enumerate(request.inputs)]


def _read(tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes | None) -> InputTensor:
    where = f"input {tensor.name[:40]!r}"
    shape = tuple(tensor.shape)
    size = element_count(where, shape)
    if tensor.datatype not in _MAX_ELEMENTS:
        allowed = _DATATYPES.get(tensor.name, ", ".join(_MAX_ELEMENTS))
        raise InvalidRequest(f"{where} has datatype {tensor.datatype[:20]!r}; it must be {allowed}")
    if "shared_memory_region" in tensor.parameters:
        raise InvalidRequest(f"{where} lies in shared memory, which this server does not read; send its contents")
    if size > _MAX_ELEMENTS[tensor.datatype]:
        most = _MAX_ELEMENTS[tensor.datatype]
        raise InvalidRequest(f"{where} has shape {list(shape)}, {size} elements; at most {most} are allowed")
    if raw is None:
        values = contents(tensor)
    elif tensor.contents.ByteSize():
        raise InvalidRequest(f"{where} has contents beside raw_input_contents; use one of the two")
    else:
        values = unpack(where, tensor.datatype, raw, size)
    if len(values) != size:
        raise InvalidRequest(
            f"{where} has {len(values)} {tensor.datatype} elements, but shape {list(shape)} needs {size}"
        )
    if tensor.datatype == "BYTES":
        return InputTensor(tensor.name, tensor.datatype, shape, bytes_values=tuple(values))
    return InputTensor(tensor.name, tensor.datatype, shape, int_values=tuple(values))


def element_count(where: str, shape: Sequence[int]) -> int:
    """Of a shape that a tensor may have; others are refused, before anything is computed of them."""
    if len(shape) > _MAX_AXES:
        raise InvalidRequest(f"{where} has {len(shape)} axes; at most {_MAX_AXES} are allowed")
    if any(size < 0 for size in shape):
        raise InvalidRequest(f"{where} has shape {list(shape)}; sizes must be 0 or more")
    return math.prod(shape)


def contents(tensor: oip.ModelInferRequest.InferInputTensor | oip.ModelInferResponse.InferOutputTensor) -> Any:
    """Its elements, as they travel where they are not raw."""
    return getattr(tensor.contents, _CONTENTS[tensor.datatype])


def unpack(where: str, datatype: str, raw: bytes, size: int) -> list[Any]:
    """Of the datatypes that inputs have. `size`: how many elements are expected."""
    return _raw_bytes(where, raw, size) if datatype == "BYTES" else _raw_integers(where, datatype, raw)


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(each)) + each for each in values)
    return np.asarray(values, _NUMBERS[datatype]).tobytes()


def _raw_bytes(where: str, raw: bytes, size: int) -> list[bytes]:
    """Each element follows its length. Reading stops after one element too many, which is enough to refuse them."""
    values: list[bytes] = []
    position = 0
    while position < len(raw) and len(values) <= size:
        begin = position + _LENGTH.size
        if begin > len(raw):
            raise InvalidRequest(f"{where} ends in the middle of a length; each element stands behind 4 bytes of it")
        position = begin + _LENGTH.unpack_from(raw, position)[0]
        if position > len(raw):
            raise InvalidRequest(f"{where} ends in the middle of an element; each stands behind 4 bytes of its length")
        values.append(raw[begin:position])
    return values


def _raw_integers(where: str, datatype: str, raw: bytes) -> list[int]:
    kind = np.dtype(INTEGERS[datatype])
    if len(raw) % kind.itemsize:
        raise InvalidRequest(f"{where} has {len(raw)} bytes, which is no whole number of {datatype} elements")
    values: list[int] = np.frombuffer(raw, kind).tolist()
    return values


class OutputWriter:
    """Adds outputs to a response, in the way in which the request had its inputs."""

    def __init__(self, response: oip.ModelInferResponse, raw: bool) -> None:
        self._response = response
        self._raw = raw

    def text(self, name: str, shape: Sequence[int], values: Sequence[str]) -> None:
        self._add(name, "BYTES", shape, [value.encode() for value in values])

    def floats(self, name: str, shape: Sequence[int], values: Sequence[float]) -> None:
        self._add(name, "FP32", shape, values)

    def integers(self, name: str, shape: Sequence[int], values: Sequence[int]) -> None:
        self._add(name, "INT64", shape, values)

    def _add(self, name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> None:
        output = self._response.outputs.add(name=name, datatype=datatype, shape=shape)
        if self._raw:
            self._response.raw_output_contents.append(pack(datatype, values))
        else:
            contents(output).extend(values)
