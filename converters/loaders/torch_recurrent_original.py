"""A user's recurrent model as PyTorch has it, for the comparison: torch.nn's own layers over packed sequences, and the
user's tensors in plain products. Nothing of our module is in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from beamline.converters.modules.recurrent.config import RecurrentConfig


@dataclass(frozen=True)
class Stack:
    """The weights of an nn.RNN, LSTM or GRU."""

    layers: Mapping[tuple[int, int], Mapping[str, Tensor]]  # by layer and direction
    cell: str
    depth: int
    directions: int
    width: int

    def module(self) -> nn.RNNBase:
        inputs = self.layers[0, 0]["weight_ih"].shape[1]
        shape = {"num_layers": self.depth, "bidirectional": self.directions == 2, "batch_first": True}
        made: nn.RNNBase
        if self.cell == "lstm":
            made = nn.LSTM(inputs, self.width, **shape)
        elif self.cell == "gru":
            made = nn.GRU(inputs, self.width, **shape)
        else:
            made = nn.RNN(inputs, self.width, nonlinearity=self.cell.removeprefix("rnn_"), **shape)
        made.load_state_dict(
            {
                f"{part}_l{layer}{'_reverse' if way else ''}": tensor
                for (layer, way), weights in self.layers.items()
                for part, tensor in weights.items()
            }
        )
        return made


@dataclass(frozen=True)
class Linear:
    weight: Tensor
    bias: Tensor | None

    @property
    def bias_or_zero(self) -> Tensor:
        return torch.zeros(len(self.weight)) if self.bias is None else self.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Original(nn.Module):
    def __init__(
        self,
        config: RecurrentConfig,
        encoder: Stack | None,
        decoder: Stack,
        embed_source: Callable[[Tensor], Tensor],
        target_embedding: Tensor,
        linears: Mapping[str, Linear],
        output: Linear,
        decoder_input: Sequence[str],
        readout_input: Sequence[str],
    ) -> None:
        super().__init__()
        self.config, self.linears, self.output = config, linears, output
        self.embed_source, self.target_embedding = embed_source, target_embedding
        self.decoder_input, self.readout_input = decoder_input, readout_input
        self.encoder, self.decoder = encoder.module() if encoder else None, decoder.module()

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        memory, ends = self._encode(source, source_mask)
        state = self._bridge(memory, source_mask, ends)
        fed = torch.zeros(len(source), self.config.fed_width)
        answers = []
        for position in range(target.shape[1]):
            parts = {"embedding": self.target_embedding[target[:, position]], "fed": fed}
            if ends:
                parts["context"] = ends[0][-1]  # of its top layer
            if self.config.attention != "none" and self.config.attention_order == "previous":
                parts["context"] = self._attend(state[0][-1], memory, source_mask, position)
                if "context_gate" in self.linears:
                    parts["context"] = parts["context"] * self.linears["context_gate"](state[0][-1]).sigmoid()
            x = torch.cat([parts[name] for name in self.decoder_input], dim=1)
            outputs, after = self.decoder(x[:, None], state if len(state) == 2 else state[0])
            state = after if isinstance(after, tuple) else (after,)
            parts["hidden"] = outputs[:, 0]
            if self.config.attention != "none" and self.config.attention_order == "new":
                parts["context"] = self._attend(parts["hidden"], memory, source_mask, position)
            hidden = torch.cat([parts[name] for name in self.readout_input], dim=1)
            if self.config.readout != "none":
                hidden = self.linears["readout"](hidden)
                hidden = hidden.tanh() if self.config.readout == "tanh" else hidden
            fed = parts["context"] if self.config.readout == "none" else hidden
            answers.append(self.output(hidden))
        return torch.stack(answers, dim=1)

    def _encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, S, m], and the last states, by kind, of each layer: [L, B, m]; without an encoder, none."""
        if self.encoder is None:
            return self.embed_source(source), []
        lengths = source_mask.sum(1)
        read = self.embed_source(self._reversed(source, lengths))
        packed = pack_padded_sequence(read, lengths, batch_first=True, enforce_sorted=False)
        found, state = self.encoder(packed)
        outputs, _ = pad_packed_sequence(found, batch_first=True, total_length=source.shape[1])
        directions = 2 if self.encoder.bidirectional else 1
        merged = self._merge(list(outputs.chunk(directions, dim=2)))
        ends = [
            self._merge([part[way::directions] for way in range(directions)])
            for part in (state if isinstance(state, tuple) else (state,))
        ]
        return self._reversed(merged, lengths), ends

    def _reversed(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.config.reverse_source:
            return x
        rows = [
            torch.cat([row[:length].flip(0), row[length:]]) for row, length in zip(x, lengths.tolist(), strict=True)
        ]
        return torch.stack(rows)

    def _merge(self, ways: list[Tensor]) -> Tensor:
        if len(ways) == 1:
            return ways[0]
        if self.config.merge == "concat":
            return torch.cat(ways, dim=-1)
        return (ways[0] + ways[1]) / (2 if self.config.merge == "mean" else 1)

    def _bridge(self, memory: Tensor, source_mask: Tensor, ends: list[Tensor]) -> tuple[Tensor, ...]:
        """[L, B, w] by kind of state."""
        depth = self.decoder.num_layers
        fields = ("bridge_hidden", "bridge_cell")[: self.config.states_per_layer]
        if self.config.bridge == "zero":
            return tuple(torch.zeros(depth, len(memory), self.decoder.hidden_size) for _ in fields)
        made = []
        for kind, field in enumerate(fields):
            if self.config.bridge_from == "mean":
                seen = [row[there].mean(0) for row, there in zip(memory, source_mask, strict=True)]
                sources = [torch.stack(seen)] * depth
            else:
                end = ends[kind]
                sources = [end[layer if self.config.bridge_from == "each" else -1] for layer in range(depth)]
            if self.config.bridge != "copy":
                sources = [self.linears[f"{field}.{layer}"](source) for layer, source in enumerate(sources)]
            if self.config.bridge == "tanh":
                sources = [source.tanh() for source in sources]
            made.append(torch.stack(sources))
        return tuple(made)

    def _attend(self, query: Tensor, memory: Tensor, source_mask: Tensor, position: int) -> Tensor:
        """query [B, q], memory [B, S, m] -> context [B, m]"""
        scores = self._scores(query, memory)
        lengths = source_mask.sum(1, keepdim=True)
        distance, visible = torch.zeros(scores.shape), source_mask
        if self.config.window == "monotonic":
            distance = torch.arange(scores.shape[1]) - (lengths - 1).clamp(max=position).float()
        elif self.config.window == "predictive":
            share = self.linears["attention_place_energy"](self.linears["attention_place"](query).tanh()).sigmoid()
            distance = torch.arange(scores.shape[1]) - share * lengths
        if self.config.window != "all":
            visible = visible & (distance.abs() <= self.config.window_radius)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(1)
        if self.config.window == "predictive":
            deviation = self.config.window_radius / 2
            weights = weights * torch.exp(-(distance**2) / (2 * deviation**2))
        return torch.einsum("bs,bsm->bm", weights, memory)

    def _scores(self, query: Tensor, memory: Tensor) -> Tensor:
        """[B, S]"""
        if self.config.attention == "additive":
            asking, key = self.linears["attention_query"], self.linears["attention_key"]
            if asking.weight is key.weight:  # one layer over both
                repeated = query[:, None].expand(-1, memory.shape[1], -1)
                mixed = asking(torch.cat([repeated, memory], dim=2))
            else:
                mixed = asking(query)[:, None] + key(memory)
            mixed = mixed.relu() if self.config.attention_activation == "relu" else mixed.tanh()
            return self.linears["attention_energy"](mixed)[:, :, 0]
        if "attention_query" in self.linears:  # general attention has its matrix on this side, or on the other
            query = self.linears["attention_query"](query)
        elif self.config.attention == "general":
            memory = self.linears["attention_key"](memory)
        scores = torch.einsum("bq,bsq->bs", query, memory)
        return scores / math.sqrt(query.shape[1]) if self.config.attention == "scaled_dot" else scores
