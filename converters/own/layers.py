"""torch.nn's recurrent layers over sources of different lengths, wherever they run.

Packed sequences can't be exported, and an exported loop would be fixed to the example's length. ONNX's own operators
take each row's length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
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
