"""Gives the portable step graph a fast path for steps without edits, samples or reports, when a graph is loaded.

A third of a small model's step graph serves forced words, edited logits, samples and reports. Most steps have none of
them: the host's lists are empty, and a scatter of nothing is what it was before. So all that depends on these lists
goes into an `If`: as it is, or without what does nothing then. Both branches compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from beamline.serving.rewrites.graph_writer import needed_nodes

PLAIN = "plain"  # an input: whether all lists are empty, and no word is forced
_LISTS = ("edit_index", "edit_scale", "edit_add", "sample_rows", "sampling", "report_rows")
_FORCED = "forced"
_OF_FORCED = ("GreaterOrEqual", "Reshape", "Unsqueeze", "Expand")  # whether a word is forced, in any shape
# What may stand in both branches, where nobody else needs it: not products, whose weights are packed at load.
_EITHER = ("Shape", "Squeeze", "Unsqueeze", "Range", "Concat", "Expand", "Reshape", "Cast", "Not", "Mul", "Add")


def with_plain_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the model, whose weights may be outside of it."""
    graph = model.graph
    special = _behind(graph.node, (*_LISTS, _FORCED))
    names = {output for node in special for output in node.output}
    outputs = [value for value in graph.output if value.name in names]
    before, special = _with_what_only_they_need(graph, special)
    choice = helper.make_node(
        "If",
        [PLAIN],
        [value.name for value in outputs],
        name="plain_or_not",
        then_branch=_branch("plain", _shortened(special, outputs), outputs, graph.value_info),
        else_branch=_branch("special", special, outputs, graph.value_info),
    )
    del graph.node[:]
    graph.node.extend([*before, choice])
    graph.input.append(helper.make_tensor_value_info(PLAIN, TensorProto.BOOL, []))
    return model


def _behind(nodes: Iterable[onnx.NodeProto], names: Sequence[str]) -> list[onnx.NodeProto]:
    """Those who read one of these, directly or not."""
    reached, found = set(names), []
    for node in nodes:
        if reached.intersection(node.input):
            found.append(node)
            reached.update(node.output)
    return found


def _with_what_only_they_need(
    graph: onnx.GraphProto, special: Sequence[onnx.NodeProto]
) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """The other nodes, and these with what is taken along."""
    inside = {node.output[0] for node in special}
    elsewhere = {value.name for value in graph.output}
    others, taken = [], []
    for node in reversed(graph.node):
        if node.output[0] in inside or (node.op_type in _EITHER and elsewhere.isdisjoint(node.output)):
            taken.append(node)
        else:
            others.append(node)
            elsewhere.update(node.input)
    return others[::-1], taken[::-1]


def _shortened(special: Sequence[onnx.NodeProto], outputs: Sequence[onnx.ValueInfoProto]) -> list[onnx.NodeProto]:
    """Without what does nothing where the lists are empty."""
    same: dict[str, str] = {}  # by name: what it is in a plain step
    empty, never = set(_LISTS), set[str]()
    made: dict[str, onnx.NodeProto] = {}
    for original in special:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        node.input[:] = [same.get(name, name) for name in node.input]
        first, output = (*node.input, "")[0], node.output[0]
        if node.op_type == "ScatterElements" and node.input[1] in empty:
            same[output] = first
        elif node.op_type == "Where" and first in never:
            same[output] = node.input[2]
        elif node.op_type != "Shape" and empty.intersection(node.input):
            empty.update(node.output)
        elif first in (_FORCED, *never) and node.op_type in _OF_FORCED:
            never.add(output)
        else:
            _shorten(node, made)
            made |= dict.fromkeys(node.output, node)
    nodes = list({id(node): node for node in made.values()}.values())
    # A branch gives only what it has made itself; reports are empty, too.
    nodes += [helper.make_node("Identity", [same[value.name]], [value.name]) for value in outputs if value.name in same]
    return nodes + [_nothing(value) for value in outputs if value.name in empty]


def _shorten(node: onnx.NodeProto, made: dict[str, onnx.NodeProto]) -> None:
    """Two that follow each other, where one is enough."""
    before = made.get(node.input[0]) if node.input else None
    if before is None:
        return
    if node.op_type == before.op_type == "Reshape":
        node.input[0] = before.input[0]  # only the last shape counts
    if node.op_type == "LogSoftmax" and before.op_type == "ScatterElements":
        normalised = made.get(before.input[0])
        if normalised is not None and normalised.op_type == "LogSoftmax":
            before.input[0] = normalised.input[0]  # words are taken out, and the others normalised: once


def _nothing(value: onnx.ValueInfoProto) -> onnx.NodeProto:
    """No rows, of the width that the graph says."""
    kind = value.type.tensor_type
    widths = [axis.dim_value for axis in kind.shape.dim[1:]]
    rows = np.zeros((0, *widths), helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return helper.make_node("Constant", [], [value.name], value=numpy_helper.from_array(rows))


def _branch(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[onnx.ValueInfoProto],
    known: Iterable[onnx.ValueInfoProto],
) -> onnx.GraphProto:
    """Names of its own: no two values of a model may share one. `known` are the shapes that the whole graph names: only
    where two are the same will the runtime write one value over another."""
    made = {output for node in nodes for output in node.output}

    def renamed(value: str) -> str:
        return f"{name}_{value}" if value in made else value

    def inside(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = renamed(value.name)
        return copy

    copies = [_copied(node, renamed) for node in needed_nodes(nodes, outputs)]
    shapes = [inside(value) for value in known if value.name in made]
    return helper.make_graph(copies, name, [], [inside(value) for value in outputs], value_info=shapes)


def _copied(node: onnx.NodeProto, renamed: Callable[[str], str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = renamed(node.output[0]) + "_node"
    copy.input[:] = map(renamed, node.input)
    copy.output[:] = map(renamed, node.output)
    return copy
