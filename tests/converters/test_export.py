"""One module to one graph: traced once where that is enough, and computing what PyTorch computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from beamline.converters.export import TracedGraph

SHAPES = [(2, 3), (1, 1), (5, 7)]


class Plain(nn.Module):
    """Nothing but what ONNX has, among it what PyTorch would take apart: reshape, chunk, dropout, a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.dropout(self.linear(x)).reshape(x.shape[0] * x.shape[1], 2, 4)
        first, second = heads.softmax(-1).to(torch.float64).float().chunk(2, dim=-1)
        found: Tensor = torch.where(torch.logical_or(first > 0.2, second > 0.3), first, second)
        return found.reshape(*x.shape[:2], 4)


class Operators(nn.Module):
    """Python's operators on tensors, which ONNX has only by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where((x > 0.5) | ((x < -0.5) & (x > -1)), x, 0.0)


class Composite(nn.Module):
    """What the exporter only finds when it translates."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, 2) + x.swapaxes(1, 2)


class Writes(nn.Module):
    """In place, as users write it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = 1
        return y.add_(1)


def compare(module: nn.Module, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    graph = TracedGraph(module, (torch.randn(2, 3, 6),), ["x"], ["y"], [("B", "S", 6)]).export()
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString())
    for rows, length in shapes:
        x = torch.randn(rows, length, 6)
        (found,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_module_of_onnx_operators_is_traced_once(traced_again: list[ExportedProgram]) -> None:
    compare(Plain(), [*SHAPES, (0, 3), (2, 0)])
    assert traced_again == []


@pytest.mark.parametrize("module", [Operators(), Composite(), Writes()], ids=lambda module: type(module).__name__)
def test_what_onnx_does_not_have_is_replaced(module: nn.Module, traced_again: list[ExportedProgram]) -> None:
    compare(module)
    assert len(traced_again) == 1
