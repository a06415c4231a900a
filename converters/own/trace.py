"""Traces a user's module as the export will, and writes nothing: what can't be traced is said in time."""

from __future__ import annotations

import re

import torch
from torch.onnx._internal.exporter._flags import set_onnx_exporting_flag
from torch.utils._pytree import tree_map

from beamline.converters.export import TracedGraph, graphs_of, quiet
from beamline.converters.modules.graphs import SearchConstants
from beamline.converters.own.load import Origin
from beamline.converters.own.steps import OwnSteps
from beamline.serving.errors import UnsupportedCheckpoint

_METHODS = {"encoder": "encode or initial_state", "step": "step", "score": "step, over a whole target,"}


def check_traceable(steps: OwnSteps, constants: SearchConstants, origin: Origin) -> None:
    for name, graph in graphs_of(steps, constants).items():
        try:
            _capture(graph)
        except Exception as error:
            where = f"{origin.file}:{origin.function}"
            raise UnsupportedCheckpoint(where, [f"{_METHODS[name]} {_explain(error, origin)}"]) from error


@set_onnx_exporting_flag  # modules compute some things differently in a graph, and ask for it
def _capture(graph: TracedGraph) -> None:
    with torch.no_grad(), quiet():
        shapes = tree_map(lambda axis: torch.export.Dim.DYNAMIC, graph.dynamic_shapes)  # never fixed to the example's
        torch.export.export(graph.module.eval(), graph.arguments, dynamic_shapes=shapes, strict=False)


def _explain(error: Exception, origin: Origin) -> str:
    text = str(error)
    place = origin.place(error) or _place_in(text, origin)
    if "data-dependent" in text or "Could not guard" in text:
        return (
            f"decides by the values of a tensor{place}; a graph is the same for all of them: use torch.where, "
            "or `over_time` for a loop"
        )
    if "specialized" in text or "Constraints violated" in text or "constant" in text:
        axes = sorted(set(re.findall(r"\b(?:L\['\w+'\]|[BKSCTE])\b(?=.{0,80}(?:speciali|constant))", text)))
        found = f" ({', '.join(axes)})" if axes else ""
        return f"is fixed to one size of an axis that must be free{found}{place}: {_first_line(text)}"
    return f"can't be traced: {type(error).__name__}: {_first_line(text)}{place}"


def _place_in(text: str, origin: Origin) -> str:
    """torch.export says in its text where the user's code stood."""
    found = re.findall(re.escape(str(origin.file.resolve())) + r'"?[:,]? ?(?:line )?(\d+)', text)
    return f" ({origin.file.name}, line {found[-1]})" if found else ""


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]
