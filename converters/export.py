"""PyTorch modules -> portable ONNX graphs that share one weights file.

`torch.onnx.export` writes the graphs; `converters/version/weights.py` takes the weights out of them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.onnx import OnnxExporterError

from beamline.converters.modules.graphs import (
    PREFILL_INPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    EncoderGraph,
    PrefillGraph,
    ScoreGraph,
    SearchConstants,
    StepGraph,
    TextScoreGraph,
)
from beamline.converters.modules.protocols import EncoderDecoder, LanguageModel, PromptReader, feature_width_of
from beamline.converters.version.weights import WEIGHTS_FILE, WeightStore, sha256_of
from beamline.serving.contract.manifest import File, Graphs, StateKind, StateTensor, Weights

OPSET = 24

# Sizes of the example tensors that tracing sees; all different, so that no two axes are taken for the same.
EXAMPLE = {"B": 2, "K": 3, "C": 16, "S": 7, "T": 5, "E": 4, "R": 6, "P": 8, "Q": 9}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bool": torch.bool, "int64": torch.int64}
_STEP_AXES: Mapping[str, tuple[str | int, ...]] = {
    "tokens": ("B", "K"),
    "positions": ("B",),
    "write_index": ("B",),
    "scores": ("B", "K"),
    "ancestry": ("B", "K", "C"),
    "width": ("B",),
    "independent": ("B",),
    "forced": ("B",),
    "edit_index": ("B", "K", "E"),
    "edit_scale": ("B", "K", "E"),
    "edit_add": ("B", "K", "E"),
    "sample_rows": ("R",),
    "sampling": ("R", 5),
    "report_rows": ("P",),
}
_STEP_DTYPES = {
    "scores": "float32",
    "ancestry": "bool",
    "independent": "bool",
    "edit_scale": "float32",
    "edit_add": "float32",
    "sampling": "float32",
}


@dataclass(frozen=True)
class ExportedFiles:
    graphs: Graphs
    weights: Weights


@dataclass(frozen=True)
class TracedGraph:
    """A module to be traced: what it is called with, and its names."""

    module: nn.Module
    arguments: tuple[object, ...]
    names: list[str]
    outputs: list[str]
    shapes: Sequence[object]  # of the arguments; an axis that has a name is dynamic

    @property
    def dynamic_shapes(self) -> tuple[object, ...]:
        def dynamic(shape: object) -> object:
            if isinstance(shape, tuple) and shape and isinstance(shape[0], tuple):
                return tuple(dynamic(part) for part in shape)
            assert isinstance(shape, tuple)
            return {index: axis for index, axis in enumerate(shape) if isinstance(axis, str)}

        return tuple(dynamic(shape) for shape in self.shapes)

    def export(self) -> ir.Model:
        with torch.no_grad(), quiet(), uncollected():
            try:
                with traced_once():
                    return self._export()
            except OnnxExporterError:
                return self._export()

    def _export(self) -> ir.Model:
        program = torch.onnx.export(
            self.module.eval(),
            self.arguments,
            dynamo=True,
            opset_version=OPSET,
            input_names=self.names,
            output_names=self.outputs,
            dynamic_shapes=self.dynamic_shapes,
            custom_translation_table={torch.ops.aten.to.dtype: _cast, torch.ops.aten.reshape.default: _reshape},
            verbose=False,
        )
        assert program is not None
        return program.model


def export_graphs(
    model: EncoderDecoder | LanguageModel, constants: SearchConstants, folder: Path, advance: Callable[[str], None]
) -> ExportedFiles:
    """Writes the graphs and their weights into `folder`; `advance` is told about each."""
    graphs: dict[str, File] = {}
    with (folder / WEIGHTS_FILE).open("wb") as file:
        store = WeightStore(file)
        for name, graph in graphs_of(model, constants).items():
            advance(f"export {name}")
            exported = graph.export()
            store.move_out(exported)
            path = folder / f"{name}.onnx"
            ir.save(exported, path)
            graphs[name] = File(file=path.name, sha256=sha256_of(path))
        file.flush()
        os.fsync(file.fileno())
    weights = folder / WEIGHTS_FILE
    return ExportedFiles(
        Graphs(**graphs), Weights(file=weights.name, sha256=sha256_of(weights), bytes=weights.stat().st_size)
    )


def graphs_of(model: EncoderDecoder | LanguageModel, constants: SearchConstants) -> dict[str, TracedGraph]:
    tensors = model.state_tensors()
    step = _step(StepGraph(model, constants), tensors)
    if isinstance(model, EncoderDecoder):
        width = feature_width_of(model)
        encoder, score = _encoder(EncoderGraph(model), tensors, width), _score(ScoreGraph(model), width)
        return {"encoder": encoder, "step": step, "score": score}
    graphs = {"step": step, "score": _text_score(TextScoreGraph(model))}
    return {"prefill": _prefill(PrefillGraph(model), tensors), **graphs} if isinstance(model, PromptReader) else graphs


def _source(feature_width: int) -> tuple[tuple[str | int, ...], str]:
    """The axes and type of an encoder's input: ids, or features."""
    return (("B", "S", feature_width), "float32") if feature_width else (("B", "S"), "int64")


def _encoder(module: nn.Module, tensors: Sequence[StateTensor], feature_width: int) -> TracedGraph:
    source, dtype = _source(feature_width)
    outputs = [tensor.name for tensor in _memory(tensors) if tensor.name != "source_mask"]
    outputs += [tensor.name for tensor in tensors if tensor.kind is StateKind.RECURRENT]
    arguments = (_example(dtype, source), torch.ones(EXAMPLE["B"], EXAMPLE["S"], dtype=torch.bool))
    return TracedGraph(module, arguments, ["source", "source_mask"], outputs, [source, ("B", "S")])


def _prefill(module: nn.Module, tensors: Sequence[StateTensor]) -> TracedGraph:
    axes: list[tuple[str | int, ...]] = [("B", "Q"), ("B",), ("B",), ("B", "Q", "C")]
    dtypes = ["bool" if name == "visible" else "int64" for name in PREFILL_INPUTS]
    arguments = (
        *(_example(dtype, shape) for dtype, shape in zip(dtypes, axes, strict=True)),
        tuple(_example(tensor.dtype, tensor.shape) for tensor in tensors),
    )
    names = [*PREFILL_INPUTS, *(tensor.name for tensor in tensors)]
    shapes = [*axes, tuple(tensor.shape for tensor in tensors)]
    return TracedGraph(module, arguments, names, [tensor.output for tensor in tensors], shapes)


def _step(module: nn.Module, tensors: Sequence[StateTensor]) -> TracedGraph:
    states = [tensor for tensor in tensors if tensor.kind is not StateKind.MEMORY]
    ordered = [*_memory(tensors), *states]
    arguments = (
        *(_example(_STEP_DTYPES.get(name, "int64"), _STEP_AXES[name]) for name in STEP_INPUTS),
        tuple(_example(tensor.dtype, tensor.shape) for tensor in ordered),
    )
    names = [*STEP_INPUTS, *(tensor.name for tensor in ordered)]
    outputs = [*STEP_OUTPUTS, *(tensor.output for tensor in states)]
    shapes = [*(_STEP_AXES[name] for name in STEP_INPUTS), tuple(tensor.shape for tensor in ordered)]
    return TracedGraph(module, arguments, names, outputs, shapes)


def _score(module: nn.Module, feature_width: int) -> TracedGraph:
    names = ["source", "source_mask", "target", "labels"]
    source, dtype = _source(feature_width)
    shapes = [source, ("B", "S"), ("B", "T"), ("B", "T")]
    dtypes = {"source": dtype, "source_mask": "bool"}
    arguments = tuple(_example(dtypes.get(name, "int64"), axes) for name, axes in zip(names, shapes, strict=True))
    return TracedGraph(module, arguments, names, ["token_log_probs", "attention"], shapes)


def _text_score(module: nn.Module) -> TracedGraph:
    shape = ("B", "T")
    arguments = (_example("int64", shape), _example("int64", shape))
    return TracedGraph(module, arguments, ["target", "labels"], ["token_log_probs"], [shape, shape])


def _memory(tensors: Sequence[StateTensor]) -> list[StateTensor]:
    return [tensor for tensor in tensors if tensor.kind is StateKind.MEMORY]


def _example(dtype: str, shape: Sequence[str | int]) -> Tensor:
    sizes = [EXAMPLE[axis] if isinstance(axis, str) else axis for axis in shape]
    return torch.zeros(sizes, dtype=_DTYPES[dtype])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter talks about packages that we don't need, and of what it can't trace it prints all that it could; a
    failure still comes as an exception."""
    unread = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Tracing makes a million objects that all live on; looking through them for garbage takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """The exporter traces a captured program anew to replace the operators that it can't translate, which takes longer
    than to capture it. Here it leaves programs alone that seem to have none; what it can't translate then is an error.
    """
    decompose = ExportedProgram.run_decompositions

    def decompose_if_needed(program: ExportedProgram, table: dict[object, object]) -> ExportedProgram:
        called = [node.target for node in program.graph.nodes if node.op == "call_function"]
        needed = any(target in table or isinstance(target, HigherOrderOperator) or _writes(target) for target in called)
        return decompose(program, table) if needed else program

    ExportedProgram.run_decompositions = decompose_if_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = decompose  # type: ignore[method-assign]


def _writes(target: object) -> bool:
    """Whether an operator changes its arguments; an ONNX graph has no such ones."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def _cast(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: object = None) -> Any:
    """`x.to(dtype)`, `x.float()` and so on, for which the exporter has no translation of its own."""
    return opset18.Cast(x, to=dtype)


def _reshape(x: Any, shape: Any) -> Any:
    """An axis of length 0 is one, as in PyTorch: the exporter's own has it copied from `x`."""
    return opset18.Reshape(x, shape, allowzero=1)
