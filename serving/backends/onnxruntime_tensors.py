"""Between us and ONNX Runtime: graphs as they are read, types, names of axes, and binding by address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from beamline.serving.backends.device import DeviceTensor, GraphSpec, TensorSpec
from beamline.serving.contract.files import read_bytes
from beamline.serving.errors import ModelError

# The numbers of the types, because NumPy has no bfloat16.
_ONNX_TYPES = {"float32": 1, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
_TYPE_NAMES = {number: name for name, number in _ONNX_TYPES.items()}
_NAMES = {"tensor(float)": "float32"}


def read_graph(path: Path) -> onnx.ModelProto:
    """Without its weights."""
    try:
        return onnx.load_model_from_string(read_bytes(path))
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error


def dtype_of(data_type: int) -> str | None:
    """By its number; None where none of our tensors has it."""
    return _TYPE_NAMES.get(data_type)


def graph_spec(session: ort.InferenceSession) -> GraphSpec:
    return GraphSpec(tuple(map(_spec, session.get_inputs())), tuple(map(_spec, session.get_outputs())))


def _spec(argument: Any) -> TensorSpec:
    dtype = _NAMES.get(argument.type) or argument.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(argument.name, dtype, tuple(argument.shape))


def bind(
    bind_tensor: Callable[..., None], name: str, tensor: DeviceTensor, place: str = "cpu", device: int = 0
) -> None:
    """`bind_tensor`: an IOBinding's `bind_input` or `bind_output`."""
    bind_tensor(name, place, device, _ONNX_TYPES[tensor.dtype], list(tensor.shape), tensor.address)
