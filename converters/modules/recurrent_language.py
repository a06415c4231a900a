"""Recurrent language models: an embedding, stacked cells, an output. No encoder, and nothing but states to remember.

`RecurrentLanguageModel` is what a user trains, built on `torch.nn`; `RecurrentLanguageSteps` is the same, written for
export, as a `LanguageModel`. A prompt goes through its steps, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor, nn

from converters.modules.recurrent_cells import Cell, State
from converters.modules.recurrent_config import GATES, RecurrentConfig
from converters.modules.recurrent_loop import over_time
from converters.modules.tree import Tree
from serving.manifest import StateKind, StateTensor


@dataclass(frozen=True)
class RecurrentLanguageConfig:
    vocab_size: int
    embedding_width: int
    width: int
    layers: int
    cell: str  # rnn_tanh, rnn_relu, lstm or gru
    eos_id: int
    start_id: int | None = None  # what stands before an empty prompt
    tie_output: bool = False
    output_bias: bool = True
    max_positions: int = 1024  # no architecture needs it: the longest text that is served

    @classmethod
    def field_names(cls) -> set[str]:
        return {field.name for field in fields(cls)}

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        sizes = ("vocab_size", "embedding_width", "width", "layers")
        found = [f"{name} is {getattr(self, name)}; it must be at least 1" for name in sizes if getattr(self, name) < 1]
        if self.cell not in GATES:
            found.append(f"cell is {self.cell!r}; allowed: {', '.join(map(repr, GATES))}")
        if self.tie_output and self.width != self.embedding_width:
            found.append(f"tie_output needs a width of {self.embedding_width}, the embedding's, not {self.width}")
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a prompt and an answer need 2")
        for name in ("eos_id", "start_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                found.append(f"{name} is {value}, outside the vocabulary")
        return found


class RecurrentLanguageModel(nn.Module):
    """`torch.nn` and nothing else, so that its state dict is anybody's."""

    def __init__(self, config: RecurrentLanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_width)
        self.rnn = self._layers(config)
        self.output = nn.Linear(config.width, config.vocab_size, bias=config.output_bias)
        if config.tie_output:
            self.output.weight = self.embedding.weight

    @staticmethod
    def _layers(config: RecurrentLanguageConfig) -> nn.RNNBase:
        sizes = (config.embedding_width, config.width, config.layers)
        if config.cell == "lstm":
            return nn.LSTM(*sizes, batch_first=True)
        if config.cell == "gru":
            return nn.GRU(*sizes, batch_first=True)
        return nn.RNN(*sizes, nonlinearity=config.cell.removeprefix("rnn_"), batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Texts [B, T] from their beginning -> logits [B, T, V] for what follows each token."""
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.output(hidden)  # type: ignore[no-any-return]


class RecurrentLanguageSteps(nn.Module):
    def __init__(self, model: RecurrentLanguageModel) -> None:
        super().__init__()
        self.config = model.config
        self.embedding, self.output = model.embedding, model.output
        self.cells = nn.ModuleList(self._cell(model, layer) for layer in range(model.config.layers))

    @staticmethod
    def _cell(model: RecurrentLanguageModel, layer: int) -> Cell:
        config = model.config
        inputs = config.width if layer else config.embedding_width
        shape = RecurrentConfig(
            source_vocab_size=config.vocab_size,
            target_vocab_size=config.vocab_size,
            embedding_width=config.embedding_width,
            encoder_width=config.width,
            decoder_width=config.width,
            encoder_layers=1,
            decoder_layers=config.layers,
            pad_id=0,
            eos_id=config.eos_id,
            decoder_start_id=0,
            cell=config.cell,
        )
        cell = Cell(shape, inputs, config.width)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell.load_state_dict({name: getattr(model.rnn, f"{name}_l{layer}") for name in names})
        return cell

    def state_tensors(self) -> list[StateTensor]:
        parts = ("hidden", "cell") if self.config.cell == "lstm" else ("hidden",)
        return [
            StateTensor(
                name=f"{part}_{layer}", kind=StateKind.RECURRENT, dtype="float32", shape=("B", "K", self.config.width)
            )
            for layer in range(self.config.layers)
            for part in parts
        ]

    def _advance(self, x: Tensor, states: State) -> tuple[Tensor, State]:
        each = len(states) // self.config.layers
        found: list[Tensor] = []
        for layer, cell in enumerate(cast(list[Cell], list(self.cells))):
            state = cell(x, states[each * layer : each * (layer + 1)])
            found.extend(state)
            x = state[0]
        return x, tuple(found)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden, states = self._advance(self.embedding(tokens), states)
        return self.output(hidden), states

    def score(self, target: Tensor) -> Tensor:
        embedded = self.embedding(target)
        zeros = torch.zeros(target.shape[0], 1, self.config.width)
        start = tuple(zeros for _ in self.state_tensors())

        def step(states: State, x: Tensor, positions: Tensor) -> tuple[State, State]:
            hidden, states = self._advance(x, states)
            return states, (hidden,)

        (hidden,) = over_time(step, start, embedded)
        return self.output(hidden)  # type: ignore[no-any-return]
