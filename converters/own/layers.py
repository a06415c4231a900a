"""torch.nn's recurrent layers over sources of different lengths, and over the one word of a step, wherever they run.

Packed sequences can't be exported, and an exported loop would be fixed to the example's length. ONNX's own operators
take each row's length. Over one word a layer is its cell, which can be traced everywhere; in a loop the layer itself
can't be, because it renews a list of its weights at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from beamline.converters.modules.recurrent.onnx_operators import onnx_order, run_operator


def read_sequence(layers: nn.RNNBase, x: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An nn.RNN, LSTM or GRU with `batch_first` over x [B, S, inputs], true in mask [B, S] where there is something.

    -> outputs [B, S, directions * width], zero behind each row's end, and the last states (hidden, or hidden and cell),
    each [B, layers * directions, width]: backwards, the state at the first position.
    """
    lengths = mask.sum(1)
    if not torch.onnx.is_in_onnx_export():
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = layers(packed)
        states = last if isinstance(last, tuple) else (last,)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])
        return padded, tuple(state.transpose(0, 1) for state in states)
    collected: list[tuple[Tensor, ...]] = []
    for layer in range(layers.num_layers):
        x, last = _as_operator(layers, layer, x, lengths)
        collected.append(last)
    return x, tuple(torch.cat(parts, dim=1) for parts in zip(*collected, strict=True))


def _as_operator(layers: nn.RNNBase, layer: int, x: Tensor, lengths: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    kind = layers.mode.lower()
    suffixes = [f"_l{layer}{'_reverse' if way else ''}" for way in range(2 if layers.bidirectional else 1)]

    def stacked(*names: str) -> Tensor:
        parts = [[onnx_order(kind, getattr(layers, name + suffix)) for name in names] for suffix in suffixes]
        return torch.stack([torch.cat(part) for part in parts])

    weight, recurrence = stacked("weight_ih"), stacked("weight_hh")
    bias = stacked("bias_ih", "bias_hh") if layers.bias else weight.new_zeros(len(suffixes), 2 * weight.shape[1])
    outputs, last = run_operator(kind, x, lengths, weight, recurrence, bias)
    return outputs.flatten(2), last


_CELLS: dict[str, Callable[..., Any]] = {
    "GRU": _VF.gru_cell,
    "LSTM": _VF.lstm_cell,
    "RNN_TANH": _VF.rnn_tanh_cell,
    "RNN_RELU": _VF.rnn_relu_cell,
}


def trace_as_cells(module: nn.Module) -> None:
    """From now on every nn.RNN, LSTM and GRU of the module is traced as cells, where it is given one position."""
    for layers in module.modules():
        if isinstance(layers, nn.RNNBase) and layers.proj_size == 0:
            layers.forward = _forward(layers, layers.forward)


def _forward(layers: nn.RNNBase, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Any, states: Any = None) -> Any:
        traced = torch.compiler.is_compiling()  # inside of a scan, torch.onnx.is_in_onnx_export says no
        if not traced or not isinstance(x, Tensor) or x.dim() != 3 or states is None:
            return original(x, states)
        time = 1 if layers.batch_first else 0
        length = x.shape[time]
        if not isinstance(length, int) or length != 1:
            return original(x, states)
        given = states if isinstance(states, tuple) else (states,)
        output, after = _one_position(layers, x.squeeze(time), given)
        return output.unsqueeze(time), after if isinstance(states, tuple) else after[0]

    return forward


def _one_position(layers: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x [N, inputs], states [layers * directions, N, width] -> [N, directions * width], and the states behind it."""
    cell, ways = _CELLS[layers.mode], 2 if layers.bidirectional else 1
    names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layers.bias else ()))
    collected: list[tuple[Tensor, ...]] = []
    for layer in range(layers.num_layers):
        for way in range(ways):
            weights = [getattr(layers, f"{name}_l{layer}{'_reverse' if way else ''}") for name in names]
            before = tuple(state[layer * ways + way] for state in states)
            found = cell(x, before if len(before) > 1 else before[0], *weights)
            collected.append(found if isinstance(found, tuple) else (found,))
        x = torch.cat([each[0] for each in collected[-ways:]], dim=-1)
    return x, tuple(torch.stack(parts) for parts in zip(*collected, strict=True))
