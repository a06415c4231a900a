"""The decoder of the recurrent family: one step of it, the same for a given target and for beams.

Shapes in comments: B requests, K beams (one where a target is given), S source positions, w the width of a state, e of
an embedding, m of the encoder's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.attention import Attention
from beamline.converters.modules.recurrent.cells import Cell, State
from beamline.converters.modules.recurrent.config import RecurrentConfig


@dataclass(frozen=True)
class Memory:
    """What the decoder may look at; rows can be picked, as of a tensor."""

    start: State  # [B, ...] each: what the decoder's states begin with
    values: Tensor | None = None  # [B, S, m]: the encoder's outputs
    keys: Tensor | None = None  # [B, S, ...]: the same as they are compared with, where they are projected for it
    context: Tensor | None = None  # [B, m]: the one vector of a model without attention

    def __getitem__(self, rows: Tensor) -> Memory:
        def pick(part: object) -> object:
            if isinstance(part, tuple):
                return tuple(map(pick, part))
            return part[rows] if isinstance(part, Tensor) else None

        return Memory(**{field.name: pick(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]


class Bridge(nn.Module):
    """From the encoder's last states to the decoder's first ones."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        top = config.encoder_layers - 1
        self.sources = [layer if config.bridge_from == "each" else top for layer in range(config.decoder_layers)]
        self.projections = nn.ModuleList()  # by decoder layer; of an LSTM, hidden and cell
        if config.bridge in ("linear", "tanh"):
            self.projections.extend(
                nn.Linear(config.bridge_output(layer), config.decoder_width)
                for layer in self.sources
                for _ in range(config.states_per_layer)
            )

    def forward(self, last: Sequence[State], mean: Tensor) -> State:
        """By encoder layer, its last state [B, ...], directions merged, and the mean of the memory [B, m] -> by decoder
        layer, its first state [B, w]."""
        config = self.config
        count = config.decoder_layers * config.states_per_layer
        if config.bridge == "zero":
            return (mean.new_zeros(mean.shape[0], config.decoder_width),) * count
        if config.bridge_from == "mean":
            states = [mean] * count
        else:
            states = [state for layer in self.sources for state in last[layer]]
        if config.bridge == "copy":
            return tuple(states)
        projected = [project(state) for project, state in zip(self.projections, states, strict=True)]
        return tuple(state.tanh() if config.bridge == "tanh" else state for state in projected)


class Advanced(NamedTuple):
    """What one step of the decoder gives."""

    features: Tensor  # [B, K, ...]: for the readout; where it is fed to the next step, the readout itself
    states: State
    weights: Tensor | None  # [B, K, S]: the attention


class Decoder(nn.Module):
    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.decoder_layers)
        self.cells = nn.ModuleList(Cell(config, config.decoder_input(layer), config.decoder_width) for layer in layers)
        self.attention = Attention(config) if config.attention != "none" else None
        gates = {"none": 0, "scalar": 1, "vector": config.memory_width}[config.context_gate]
        self.gate = nn.Linear(config.decoder_width, gates) if gates else None
        self.readout = (
            nn.Linear(config.feature_width, config.readout_width) if config.readout != "none" else nn.Identity()
        )
        self.asking = 0 if config.attention_layer == "bottom" else config.decoder_layers - 1
        self.dropout = nn.Dropout(config.dropout)

    def advance(
        self, embedded: Tensor, positions: Tensor, memory: Memory, source_mask: Tensor | None, states: State
    ) -> Advanced:
        """embedded [B, K, e], positions [B], states [B, K, ...] in the order of `Memory.start`. Without attention
        there is no need for a mask."""
        config, per_layer = self.config, self.config.states_per_layer
        context = weights = None
        if memory.context is not None:
            context = memory.context[:, None, :].expand(-1, embedded.shape[1], -1)

        def attend(query: Tensor) -> tuple[Tensor, Tensor]:
            assert self.attention is not None
            assert memory.values is not None
            assert source_mask is not None
            keys = memory.values if memory.keys is None else memory.keys
            return self.attention(query, keys, memory.values, source_mask, positions)  # type: ignore[no-any-return]

        if self.attention is not None and config.attention_order == "previous":
            asking = states[self.asking * per_layer]
            context, weights = attend(asking)
            if self.gate is not None:
                context = self.gate(asking).sigmoid() * context
        x, new_states = embedded, []
        for number, cell in enumerate(cast(list[Cell], list(self.cells))):
            inputs = [self.dropout(x) if number else x]
            if number == 0 and config.input_feeding:
                inputs.append(states[-1])
            if context is not None and config.context_enters(number):
                inputs.append(context)
            state = cell(torch.cat(inputs, dim=-1), states[number * per_layer : (number + 1) * per_layer])
            new_states.extend(state)
            x = state[0] + x if config.adds_input(number) else state[0]
            if number == self.asking and self.attention is not None and config.attention_order == "new":
                context, weights = attend(x)
        features = [x]
        if context is not None and config.readout_context:
            features.append(context)
        if config.readout_embedding:
            features.append(embedded)
        found = torch.cat(features, dim=-1)
        if config.input_feeding:
            if config.readout != "none":
                found = self.read_out(found)
            assert context is not None
            new_states.append(context if config.readout == "none" else found)
        return Advanced(found, tuple(new_states), weights)

    def read_out(self, features: Tensor) -> Tensor:
        projected = self.readout(features)
        return projected.tanh() if self.config.readout == "tanh" else projected  # type: ignore[no-any-return]

    def finish(self, features: Tensor) -> Tensor:
        """What the output projection gets, of any number of steps at once."""
        return self.dropout(features if self.config.input_feeding else self.read_out(features))  # type: ignore[no-any-return]
