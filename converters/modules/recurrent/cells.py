"""Recurrent cells, and the encoder's layers made of them.

A cell's weights are laid out as in `torch.nn.RNN`, `LSTM` and `GRU`, so that trained ones fit as they are. Besides,
an LSTM may have peepholes and coupled gates.
Shapes in comments: B requests, S source positions, D directions, w the width of a state, G gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from beamline.converters.modules.recurrent.config import GATES, EncoderStack

State = tuple[Tensor, ...]  # (hidden,) or, of an LSTM, (hidden, cell)
RunLayer = Callable[[Tensor, Tensor], tuple[Tensor, State]]  # as `EncoderLayer.forward`
_FUSED = {"rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu, "gru": torch.gru, "lstm": torch.lstm}


class Cell(nn.Module):
    def __init__(self, config: EncoderStack, inputs: int, width: int) -> None:
        super().__init__()
        self.kind, self.width = config.cell, width
        self.coupled = config.coupled_gates
        gates = GATES[config.cell] - self.coupled  # the input gate is what the forget gate leaves: f g o
        self.weight_ih = nn.Parameter(torch.empty(gates * width, inputs))
        self.weight_hh = nn.Parameter(torch.empty(gates * width, width))
        self.bias_ih = nn.Parameter(torch.empty(gates * width))
        self.bias_hh = nn.Parameter(torch.empty(gates * width))  # not the same as bias_ih: a gru's reset acts on it
        # The rows are the gates i f o, or f o.
        self.peephole = nn.Parameter(torch.empty(3 - self.coupled, width)) if config.peepholes else None
        self.reset()

    def reset(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.width**-0.5), self.width**-0.5)

    @property
    def is_standard(self) -> bool:
        """One of torch.nn's."""
        return self.peephole is None and not self.coupled

    @property
    def standard_weights(self) -> list[Tensor]:
        return [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]

    def start(self, like: Tensor) -> State:
        """Zeros [..., w] for an input [..., inputs]."""
        zeros = like.new_zeros(*like.shape[:-1], self.width)
        return (zeros, zeros) if self.kind == "lstm" else (zeros,)

    def forward(self, x: Tensor, state: State) -> State:
        """x [..., inputs], state [..., w] -> the next state: one step in plain products, wherever it runs."""
        from_input = F.linear(x, self.weight_ih, self.bias_ih)  # [..., G * w]
        from_state = F.linear(state[0], self.weight_hh, self.bias_hh)
        if self.kind == "gru":
            return (self._gru(from_input, from_state, state[0]),)
        if self.kind == "lstm":
            return self._lstm(from_input + from_state, state[1])
        total = from_input + from_state
        return (total.tanh() if self.kind == "rnn_tanh" else total.relu(),)

    @staticmethod
    def _gru(from_input: Tensor, from_state: Tensor, hidden: Tensor) -> Tensor:
        input_reset, input_update, input_new = from_input.chunk(3, dim=-1)
        state_reset, state_update, state_new = from_state.chunk(3, dim=-1)
        reset = (input_reset + state_reset).sigmoid()
        update = (input_update + state_update).sigmoid()
        new = (input_new + reset * state_new).tanh()
        return new + update * (hidden - new)

    def _lstm(self, gates: Tensor, cell: Tensor) -> State:
        *take_in, forget, new, out = gates.chunk(3 if self.coupled else 4, dim=-1)
        if self.peephole is not None:
            *peep_in, peep_forget, peep_out = self.peephole.unbind()
            take_in = [gate + peep * cell for gate, peep in zip(take_in, peep_in, strict=True)]
            forget = forget + peep_forget * cell
        forget = forget.sigmoid()
        share = 1 - forget if self.coupled else take_in[0].sigmoid()
        cell = forget * cell + share * new.tanh()
        if self.peephole is not None:
            out = out + peep_out * cell
        return out.sigmoid() * cell.tanh(), cell


class EncoderLayer(nn.Module):
    """One layer over a whole source, in one direction or in both."""

    def __init__(self, config: EncoderStack, inputs: int, directions: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(config, inputs, config.encoder_width) for _ in range(directions))

    @property
    def directions(self) -> list[Cell]:
        """Forwards, and backwards."""
        return cast(list[Cell], list(self.cells))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """x [B, S, inputs], lengths [B] -> outputs [B, S, D, w], zero where there is no word, and the last states
        [B, D, w]: backwards, the state at the first word."""
        if self.directions[0].is_standard:
            return self._fused(x, lengths)
        valid = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, :, None]  # [B, S, 1]
        runs = [_run(cell, x, valid, backwards=bool(number)) for number, cell in enumerate(self.directions)]
        outputs = torch.stack([outputs for outputs, _ in runs], dim=2)
        last = zip(*(state for _, state in runs), strict=True)
        return outputs, tuple(torch.stack(part, dim=1) for part in last)

    def _fused(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """By PyTorch's own kernels, which training needs: each word is computed once, and no padding."""
        cells = self.directions
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        zeros = x.new_zeros(len(cells), x.shape[0], cells[0].width)
        weights = [weight for cell in cells for weight in cell.standard_weights]
        start = (zeros, zeros) if cells[0].kind == "lstm" else zeros
        fused = _FUSED[cells[0].kind]
        data, *state = fused(  # type: ignore[operator]
            packed.data, packed.batch_sizes, start, weights, True, 1, 0.0, self.training, len(cells) == 2
        )
        outputs, _ = pad_packed_sequence(
            PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices),
            batch_first=True,
            total_length=x.shape[1],
        )
        last = tuple(part[:, packed.unsorted_indices].transpose(0, 1) for part in state)
        return outputs.reshape(*x.shape[:2], len(cells), cells[0].width), last


def _run(cell: Cell, x: Tensor, valid: Tensor, backwards: bool) -> tuple[Tensor, State]:
    """Word by word; padding leaves the state as it is."""
    state = cell.start(x[:, 0])
    outputs = [x] * x.shape[1]
    places = range(x.shape[1])
    for place in reversed(places) if backwards else places:
        new = cell(x[:, place], state)
        state = tuple(torch.where(valid[:, place], after, before) for after, before in zip(new, state, strict=True))
        outputs[place] = torch.where(valid[:, place], state[0], 0.0)
    return torch.stack(outputs, dim=1), state


def read_layers(
    config: EncoderStack,
    layers: Sequence[RunLayer],
    x: Tensor,
    lengths: Tensor,
    dropout: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[State]]:
    """x [B, S, e] through a stack -> the top layer's outputs [B, S, m], and each layer's last state, merged."""
    last: list[State] = []
    for number, layer in enumerate(layers):
        outputs, state = layer(dropout(x) if number else x, lengths)
        last.append(tuple(merge_directions(part, config.merge) for part in state))
        merged = merge_directions(outputs, config.merge)
        x = merged + x if config.adds_input(number) else merged
    return x, last


def merge_directions(x: Tensor, how: str) -> Tensor:
    """[..., D, w] -> [..., w], or [..., D * w] where they are concatenated."""
    if how == "concat":
        return x.flatten(-2)
    return x.sum(-2) if how == "sum" else x.mean(-2)


def reversed_places(lengths: Tensor, size: int) -> Tensor:
    """[B, S]: where each place's word stands when every source is reversed within its length."""
    places = torch.arange(size, device=lengths.device)[None, :]
    return torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
