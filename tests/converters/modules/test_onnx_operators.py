"""An encoder layer as ONNX's own operator, run by ONNX Runtime, against PyTorch's layers over packed sequences."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from beamline.converters.modules.recurrent.cells import EncoderLayer
from beamline.converters.modules.recurrent.onnx_operators import OPERATORS, VERSION, OnnxLayer, attributes
from tests.support.recurrent import CELLS, Shape

INPUTS, LENGTHS = 5, (6, 1, 3)
assert_same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def run_operator(layer: OnnxLayer, x: Tensor, lengths: Tensor) -> list[np.ndarray]:
    """Y [S, D, B, w], Y_h [D, B, w] and, of an LSTM, Y_c."""
    weights = {"W": layer.weight, "R": layer.recurrence, "B": layer.bias}
    names = ["X", "W", "R", "B", "lengths"]
    if layer.peephole is not None:
        weights["P"] = layer.peephole
        names += ["", "", "P"]
    directions, _, width = layer.recurrence.shape
    outputs = ["Y", "Y_h", "Y_c"] if layer.kind == "lstm" else ["Y", "Y_h"]
    graph = helper.make_graph(
        [helper.make_node(OPERATORS[layer.kind], names, outputs, **attributes(layer.kind, width, directions))],
        "layer",
        [
            helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, None, INPUTS]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, [None]),
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (4 if name == "Y" else 3))
            for name in outputs
        ],
        [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", VERSION)], ir_version=10)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"X": x.transpose(0, 1).numpy(), "lengths": lengths.to(torch.int32).numpy()}
    return list(session.run(outputs, feeds))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_an_operator_is_its_layer(cell: str, directions: int) -> None:
    torch.manual_seed(0)
    layer = EncoderLayer(Shape(cell).config(50), INPUTS, directions).eval()
    x, lengths = torch.randn(len(LENGTHS), max(LENGTHS), INPUTS), torch.tensor(LENGTHS)
    expected, last = layer(x, lengths)
    # Whatever stands in the padding: it changes nothing, and nothing comes out of it.
    spoilt = torch.where((torch.arange(max(LENGTHS)) < lengths[:, None])[:, :, None], x, 1e3)
    found, *states = run_operator(OnnxLayer(layer), spoilt, lengths)
    assert_same(found.transpose(2, 0, 1, 3), expected.numpy())
    assert len(states) == len(last)
    for state, want in zip(states, last, strict=True):
        assert_same(state.transpose(1, 0, 2), want.numpy())


@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_learns_through_all_its_weights(cell: str) -> None:
    """Padding has no gradient, and every weight has one: by the fused kernels, and word by word."""
    torch.manual_seed(0)
    layer = EncoderLayer(Shape(cell).config(50), INPUTS, 2)
    x = torch.randn(len(LENGTHS), max(LENGTHS), INPUTS, requires_grad=True)
    outputs, last = layer(x, torch.tensor(LENGTHS))
    (outputs.square().sum() + sum(state.sum() for state in last)).backward()
    assert x.grad is not None
    for row, length in enumerate(LENGTHS):
        assert x.grad[row, :length].abs().sum() > 0
        assert not x.grad[row, length:].any()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
