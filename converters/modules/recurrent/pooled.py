"""The reference recurrent network of many to one: it reads a text, pools its states to one vector, and labels it.

    source -> embedding -> layers -> states -> pooling -> vector [-> hidden layer] -> labels

Shapes in comments: B requests, S positions, m the width of the top layer's outputs, L labels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.initialization import reset
from beamline.converters.modules.recurrent.cells import EncoderLayer, RunLayer, read_layers, reversed_places
from beamline.converters.modules.recurrent.config import CHOICES, EncoderStack
from beamline.converters.modules.recurrent.onnx_operators import OnnxLayer

POOLINGS = ("last", "mean", "max", "attention")
_HIDDEN = -1e9  # the score of what is not there; finite, so that a softmax over it is a number
_SIZES = ("vocab_size", "embedding_width", "encoder_width", "encoder_layers", "max_positions")


@dataclass(frozen=True)
class PooledConfig(EncoderStack):
    """Everything that shapes the network. Without labels it only embeds."""

    vocab_size: int
    embedding_width: int
    encoder_width: int
    encoder_layers: int
    pad_id: int
    labels: tuple[str, ...] = ()
    multi_label: bool = False  # a sigmoid for each label instead of one softmax over all
    pooling: str = "last"  # what the labels see; an embedding may ask for another
    attention: bool = False  # there is a learned query, also where the labels don't use it
    attention_width: int = 0  # states are projected (tanh) before they meet the query; 0: they meet it as they are
    head_width: int = 0  # a hidden layer (ReLU) between vector and labels; 0: none
    cell: str = "lstm"
    peepholes: bool = False
    coupled_gates: bool = False
    bidirectional: str = "none"
    merge: str = "concat"
    residual_from: int | None = None
    reverse_source: bool = False
    max_positions: int = 256
    normalize: bool = False  # vectors to length one, unless a request says otherwise
    dropout: float = 0.1

    @property
    def has_query(self) -> bool:
        return self.attention or self.pooling == "attention"

    @property
    def poolings(self) -> tuple[str, ...]:
        """Those that it can do, its own first."""
        others = [name for name in POOLINGS if name != "attention" or self.has_query]
        return (self.pooling, *(name for name in others if name != self.pooling))

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        allowed = {**{name: CHOICES[name] for name in ("cell", "bidirectional", "merge")}, "pooling": POOLINGS}
        found = [
            f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(repr, values))}"
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]
        found += [
            f"{name} is {getattr(self, name)}; it must be at least 1" for name in _SIZES if getattr(self, name) < 1
        ]
        if not 0 <= self.pad_id < self.vocab_size:
            found.append(f"pad_id is {self.pad_id}, outside the vocabulary")
        if len(set(self.labels)) != len(self.labels):
            found.append("labels has one of them twice")
        if self.labels and len(self.labels) < 2 and not self.multi_label:
            found.append("one label alone is always certain: give at least 2, or multi_label")
        return found or self.reading_problems()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def field_names(cls) -> set[str]:
        return {field.name for field in fields(cls)}


class Pooling(nn.Module):
    def __init__(self, config: PooledConfig) -> None:
        super().__init__()
        width = config.attention_width or config.memory_width
        self.projection = nn.Linear(config.memory_width, width) if config.attention_width else None
        self.query = nn.Parameter(torch.randn(width) * width**-0.5) if config.has_query else None

    def forward(self, how: str, states: Tensor, last: Tensor, mask: Tensor) -> Tensor:
        """states [B, S, m], last [B, m], mask [B, S] -> [B, m]"""
        if how == "last":
            return last
        there = mask[:, :, None]
        if how == "mean":
            return torch.where(there, states, 0.0).sum(1) / mask.sum(1, keepdim=True)
        if how == "max":
            return torch.where(there, states, _HIDDEN).amax(1)
        assert self.query is not None
        seen = states if self.projection is None else self.projection(states).tanh()
        weights = torch.where(mask, seen @ self.query, _HIDDEN).softmax(-1)  # [B, S]
        return (weights[:, None, :] @ states)[:, 0]


class RecurrentPooled(nn.Module):
    def __init__(self, config: PooledConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_width)
        self.encoder = nn.ModuleList(
            EncoderLayer(config, config.encoder_input(layer), config.directions(layer))
            for layer in range(config.encoder_layers)
        )
        self.pooling = Pooling(config)
        width = config.head_width or config.memory_width
        self.head = nn.Linear(config.memory_width, width) if config.head_width else None
        self.output = nn.Linear(width, len(config.labels)) if config.labels else None
        self.dropout = nn.Dropout(config.dropout)
        reset(self, config.embedding_width)

    def read(self, source: Tensor, source_mask: Tensor, layers: list[RunLayer] | None = None) -> dict[str, Tensor]:
        """source [B, S], source_mask [B, S] -> one vector [B, m] for each pooling."""
        lengths = source_mask.sum(1)
        places = reversed_places(lengths, source.shape[1]) if self.config.reverse_source else None
        x = self.dropout(self.embedding(source if places is None else source.gather(1, places)))
        stack = layers or cast(list[RunLayer], list(self.encoder))
        states, last = read_layers(self.config, stack, x, lengths, self.dropout)
        return {how: self.pooling(how, states, last[-1][0], source_mask) for how in self.config.poolings}

    def logits(self, vector: Tensor) -> Tensor:
        assert self.output is not None
        hidden = vector if self.head is None else self.head(vector).relu()
        return self.output(self.dropout(hidden))  # type: ignore[no-any-return]

    def forward(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """Logits [B, L], for training."""
        return self.logits(self.read(source, source_mask)[self.config.pooling])

    def outputs(self, source: Tensor, source_mask: Tensor, layers: list[RunLayer] | None = None) -> dict[str, Tensor]:
        """All that the server may be asked for, by the names of `PooledManifest`."""
        vectors = self.read(source, source_mask, layers)
        found = {f"vector_{how}": vector for how, vector in vectors.items()}
        if self.output is not None:
            logits = self.logits(vectors[self.config.pooling])
            found["probabilities"] = logits.sigmoid() if self.config.multi_label else logits.softmax(-1)
        return found


class PooledGraph(nn.Module):
    """What is exported."""

    def __init__(self, model: RecurrentPooled) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList(OnnxLayer(layer) for layer in model.encoder if isinstance(layer, EncoderLayer))

    @property
    def names(self) -> list[str]:
        names = [f"vector_{how}" for how in self.model.config.poolings]
        return [*names, "probabilities"] if self.model.config.labels else names

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        layers = cast(list[RunLayer], list(self.layers))
        found = self.model.outputs(source, source_mask, layers)
        return tuple(found[name] for name in self.names)
