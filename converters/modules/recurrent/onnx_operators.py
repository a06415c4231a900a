"""ONNX's own RNN, LSTM and GRU operators, which take each row's length: nothing is packed, and padding changes nothing.

Coupled gates need no operator of their own: the input gate 1 - sigmoid(a) is sigmoid(-a), a gate with the forget gate's
weights negated.

Shapes in comments: B requests, S source positions, D directions, w the width of a state, G gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.cells import Cell, EncoderLayer, State

OPERATORS = {"rnn_tanh": "RNN", "rnn_relu": "RNN", "lstm": "LSTM", "gru": "GRU"}
VERSION = 22  # of these operators, in opset 24
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}  # torch.nn's gates in ONNX's order: i o f g, and z r n


def onnx_order(kind: str, tensor: Tensor) -> Tensor:
    """A weight or bias [G * w, ...] with torch.nn's gates -> with its gates as ONNX has them."""
    if kind not in _GATES:
        return tensor
    gates = tensor.chunk(len(_GATES[kind]))
    return torch.cat([gates[number] for number in _GATES[kind]])


def attributes(kind: str, width: int, directions: int) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_size": width, "direction": "bidirectional" if directions == 2 else "forward"}
    if kind == "gru":
        found["linear_before_reset"] = 1
    elif kind != "lstm":
        found["activations"] = ["Relu" if kind == "rnn_relu" else "Tanh"] * directions
    return found


def run_operator(
    kind: str,
    x: Tensor,  # [B, S, inputs]
    lengths: Tensor,  # [B]
    weight: Tensor,  # [D, G * w, inputs]
    recurrence: Tensor,  # [D, G * w, w]
    bias: Tensor,  # [D, 2 * G * w]
    peephole: Tensor | None = None,  # [D, 3 * w], gates i o f
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """-> outputs [B, S, D, w], and the last states [B, D, w]. In a graph only."""
    directions, _, width = recurrence.shape
    batch, length = x.shape[:2]
    states = 2 if kind == "lstm" else 1
    inputs = (x.transpose(0, 1), weight, recurrence, bias, lengths.to(torch.int32))
    outputs, *last = torch.onnx.ops.symbolic_multi_out(
        OPERATORS[kind],
        inputs if peephole is None else (*inputs, None, None, peephole),
        attributes(kind, width, directions),
        dtypes=[x.dtype] * (1 + states),
        shapes=[(length, directions, batch, width), *[(directions, batch, width)] * states],
        version=VERSION,
    )
    return outputs.permute(2, 0, 1, 3), tuple(state.transpose(0, 1) for state in last)


def _gates(cell: Cell, tensor: Tensor) -> Tensor:
    """A weight or bias as ONNX has it; where gates are coupled, with an input gate of its own."""
    return onnx_order(cell.kind, torch.cat([-tensor[: cell.width], tensor]) if cell.coupled else tensor)


def _peephole(cell: Cell) -> Tensor:
    """[3 * w], gates i o f."""
    assert cell.peephole is not None
    *take_in, forget, out = cell.peephole.unbind()
    return torch.cat([take_in[0] if take_in else -forget, out, forget])


class OnnxLayer(nn.Module):
    """An encoder layer as one operator; its weights are taken as they are now."""

    weight: Tensor  # [D, G * w, inputs]
    recurrence: Tensor  # [D, G * w, w]
    bias: Tensor  # [D, 2 * G * w]
    peephole: Tensor | None  # [D, 3 * w]

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        cells = layer.directions
        self.kind = cells[0].kind

        def keep(name: str, parts: list[Tensor]) -> None:
            self.register_buffer(name, torch.stack(parts).detach().clone(), persistent=False)

        keep("weight", [_gates(cell, cell.weight_ih) for cell in cells])
        keep("recurrence", [_gates(cell, cell.weight_hh) for cell in cells])
        keep("bias", [torch.cat([_gates(cell, bias) for bias in (cell.bias_ih, cell.bias_hh)]) for cell in cells])
        if cells[0].peephole is None:
            self.peephole = None
        else:
            keep("peephole", [_peephole(cell) for cell in cells])

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """As `EncoderLayer.forward`, in a graph only."""
        return run_operator(self.kind, x, lengths, self.weight, self.recurrence, self.bias, self.peephole)
