"""Recurrent language models: an embedding, stacked cells, an output. No encoder, and nothing but states to remember.

`RecurrentLanguageModel` is what a user trains: the layers of the recurrent family, which with plain cells are those of
`torch.nn`. `RecurrentLanguageSteps` is the same as a `LanguageModel`. A prompt goes through its steps, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.cells import EncoderLayer, RunLayer, read_layers
from beamline.converters.modules.recurrent.config import GATES, EncoderStack
from beamline.converters.modules.recurrent.onnx_operators import OnnxLayer
from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateKind, StateTensor


@dataclass(frozen=True)
class RecurrentLanguageConfig(EncoderStack):
    vocab_size: int
    embedding_width: int
    width: int
    layers: int
    cell: str  # rnn_tanh, rnn_relu, lstm or gru
    eos_id: int
    peepholes: bool = False  # an lstm's gates see its cell state
    coupled_gates: bool = False  # an lstm forgets exactly as much as it takes in
    residual_from: int | None = None  # from this layer on (the bottom is 0), a layer adds its input
    start_id: int | None = None  # what stands before an empty prompt
    tie_output: bool = False
    output_bias: bool = True
    max_positions: int = 1024  # no architecture needs it: the longest text that is served

    bidirectional = "none"  # what follows can't be known
    merge = "concat"

    @property
    def encoder_width(self) -> int:  # type: ignore[override]
        return self.width

    @property
    def encoder_layers(self) -> int:  # type: ignore[override]
        return self.layers

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
        return found or self.reading_problems()


class RecurrentLanguageModel(nn.Module):
    def __init__(self, config: RecurrentLanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_width)
        self.layers = nn.ModuleList(EncoderLayer(config, config.encoder_input(n), 1) for n in range(config.layers))
        self.output = nn.Linear(config.width, config.vocab_size, bias=config.output_bias)
        if config.tie_output:
            self.output.weight = self.embedding.weight

    @property
    def stack(self) -> list[EncoderLayer]:
        return cast(list[EncoderLayer], list(self.layers))

    def forward(self, tokens: Tensor, layers: Sequence[RunLayer] | None = None) -> Tensor:
        """Texts [B, T] from their beginning -> logits [B, T, V] for what follows each token. `layers` may compute the
        same in another way."""
        lengths = torch.ones_like(tokens).sum(1)  # what stands behind a text's end changes nothing before it
        embedded = self.embedding(tokens)
        hidden, _ = read_layers(self.config, layers or self.stack, embedded, lengths, nn.Identity())
        return self.output(hidden)  # type: ignore[no-any-return]


class RecurrentLanguageSteps(nn.Module):
    def __init__(self, model: RecurrentLanguageModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.layers = nn.ModuleList(OnnxLayer(layer) for layer in model.stack)

    def state_tensors(self) -> list[StateTensor]:
        parts = ("hidden", "cell")[: self.config.states_per_layer]
        return [
            StateTensor(
                name=f"{part}_{layer}", kind=StateKind.RECURRENT, dtype="float32", shape=("B", "K", self.config.width)
            )
            for layer in range(self.config.layers)
            for part in parts
        ]

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        each = self.config.states_per_layer
        x: Tensor = self.model.embedding(tokens)
        found: list[Tensor] = []
        for number, layer in enumerate(self.model.stack):
            state = layer.directions[0](x, states[each * number : each * (number + 1)])
            found.extend(state)
            x = state[0] + x if self.config.adds_input(number) else state[0]
        return self.model.output(x), tuple(found)

    def score(self, target: Tensor) -> Tensor:
        layers = cast(list[RunLayer], list(self.layers)) if torch.onnx.is_in_onnx_export() else None
        return self.model(target, layers)  # type: ignore[no-any-return]
