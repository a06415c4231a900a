"""The weights of all graphs of a version, in one file.

A tensor is stored once where two are equal to the byte (the score graph repeats the encoder's and the decoder's), and
in half precision where that loses nothing: many checkpoints are published that way. The graph then casts it back, once,
when it is loaded; what is computed stays the same to the bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from beamline.serving.contract.manifest import LARGEST_PAIR

WEIGHTS_FILE = "weights.bin"
INLINE_BYTES = 1024  # smaller tensors stay in the graph: shapes and scalars that a runtime wants to fold
ALIGNMENT = 64  # of a tensor in the weights file, so that it can be mapped and used as it lies


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WeightStore:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offsets: dict[tuple[str, str, tuple[int, ...]], int] = {}

    def move_out(self, model: ir.Model) -> None:
        """Leaves the graph with small constants only, and without the notes that tracing left in it (stack traces with
        the paths of this machine)."""
        _strip(model)
        _drop_unused(model.graph)
        for value in list(model.graph.initializers.values()):
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes < INLINE_BYTES:
                continue
            half = _as_half(tensor)
            if half is None:
                value.const_value = self._store(tensor)
            else:
                _cast_from(model.graph, value, self._store(half))

    def _store(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        content = tensor.tobytes()
        key = (hashlib.sha256(content).hexdigest(), str(tensor.dtype), tuple(tensor.shape.numpy()))
        if key not in self._offsets:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            self._offsets[key] = self._file.tell()
            self._file.write(content)
        return ir.ExternalTensor(
            location=WEIGHTS_FILE,
            offset=self._offsets[key],
            length=len(content),
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            base_dir="",
        )


def restore_full_precision(model: ir.Model) -> None:
    """Undoes what `WeightStore` did to tensors that fit into half precision, for passes that look for weights."""
    for node in list(model.graph):
        value = node.inputs[0] if node.op_type == "Cast" else None
        if value is None or value.const_value is None or value.const_value.dtype is not ir.DataType.FLOAT16:
            continue
        cast = node.outputs[0]
        tensor = ir.Tensor(value.const_value.numpy().astype(np.float32), name=str(cast.name).removesuffix("_full"))
        full = ir.Value(name=tensor.name, type=cast.type, shape=tensor.shape, const_value=tensor)
        model.graph.register_initializer(full)
        ir.convenience.replace_all_uses_with(cast, full)
        model.graph.remove(node, safe=True)  # lets go of its input, too
    _drop_unused(model.graph)


def _strip(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for name in model.metadata_props.keys() - {LARGEST_PAIR}:
        del model.metadata_props[name]
    model.graph.metadata_props.clear()


def _drop_unused(graph: ir.Graph) -> None:
    """Constants that tracing left over, about which a runtime would complain at every load."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def _as_half(tensor: ir.TensorProtocol) -> ir.TensorProtocol | None:
    """The same values in half precision, where every one of them survives it."""
    if tensor.dtype is not ir.DataType.FLOAT:
        return None
    full = tensor.numpy()
    with np.errstate(over="ignore"):
        half = full.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), full):
        return None
    return ir.Tensor(half, name=f"{tensor.name}_half")


def _cast_from(graph: ir.Graph, value: ir.Value, half: ir.ExternalTensor) -> None:
    """The initializer becomes a cast of one in half precision."""
    stored = ir.Value(name=half.name, type=ir.TensorType(ir.DataType.FLOAT16), shape=half.shape, const_value=half)
    name = value.name
    del graph.initializers[str(name)]
    graph.register_initializer(stored)
    cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT}, name=f"{name}_cast")
    cast.outputs[0].name = f"{name}_full"
    cast.outputs[0].type = value.type
    cast.outputs[0].shape = value.shape
    ir.convenience.replace_all_uses_with(value, cast.outputs[0])
    graph.insert_before(graph[0], cast)
