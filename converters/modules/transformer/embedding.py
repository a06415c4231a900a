"""Tokens and their positions."""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.transformer.attention import Angles
from beamline.converters.modules.transformer.config import StackConfig
from beamline.converters.modules.transformer.norms import make_norm

_LEARNED_SPREAD: Final = 0.02


def sinusoidal_table(kind: str, length: int, width: int) -> Tensor:
    """[length, width]: sin/cos interleaved, or in two halves."""
    # On the CPU, also where the model around it is on paper only, until its weights have come.
    places, pairs = torch.arange(length, device="cpu"), torch.arange(0, width, 2, device="cpu")
    angles = places[:, None] / 10000 ** (pairs / width)
    if kind == "sinusoidal_halves":
        return torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.stack([angles.sin(), angles.cos()], dim=2).reshape(length, width)


def fairseq_table(length: int, width: int, offset: int) -> Tensor:
    """[1 + length, width]: fairseq's formula in two halves, whose first position is `offset`. The first row is that of
    a padding token, which has no position."""
    half = width // 2
    steps = torch.exp(torch.arange(half, device="cpu").float() * -(math.log(10000) / (half - 1)))
    angles = (torch.arange(length, device="cpu").float() + offset)[:, None] * steps
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, 0, 1, 0))


class Rotary(nn.Module):
    """Tables instead of angles computed in the graph: cosines of large numbers are where runtimes differ."""

    cos: Tensor  # [positions, D/2]
    sin: Tensor

    def __init__(self, positions: int, head_width: int) -> None:
        super().__init__()
        self.positions = positions
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(positions, head_width // 2), persistent=False)

    def set_frequencies(self, frequencies: Tensor, scaling: float) -> None:
        """frequencies [D/2], by whatever rule a checkpoint has for long texts; `scaling` multiplies what is rotated.
        Where there are fewer, the rest of a head stays as it is."""
        angles = torch.arange(self.positions).float()[:, None] * frequencies.float()
        rest = (0, self.cos.shape[1] - len(frequencies))
        self.cos = F.pad(angles.cos() * scaling, rest, value=1.0)
        self.sin = F.pad(angles.sin() * scaling, rest)

    def forward(self, positions: Tensor) -> Angles:
        return Angles(F.embedding(positions, self.cos), F.embedding(positions, self.sin))


class Embedding(nn.Module):
    """Tokens [B, T] -> [B, T, d], with their positions where these are added."""

    def __init__(self, config: StackConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = config.embedding_scale
        self.dropout = nn.Dropout(config.dropout)
        self.norm = make_norm(config.norm, config.d_model) if config.embedding_norm else None
        self.kind = config.positions
        self.padding_id = config.padding_id
        tables = range(config.angle_tables)
        self.rotary = nn.ModuleList(Rotary(config.max_positions, config.attention.head_width) for _ in tables)
        self.projection: nn.Linear | None = None
        if config.embedding_width is not None:
            self.projection = nn.Linear(config.embedding_width, config.d_model, bias=False)
        if self.kind == "learned":
            self.table: Tensor = nn.Parameter(torch.randn(config.max_positions, config.d_model) * _LEARNED_SPREAD)
        elif self.kind == "learned_fairseq":
            self.table = nn.Parameter(torch.randn(1 + config.max_positions, config.d_model) * _LEARNED_SPREAD)
        elif self.kind == "sinusoidal_fairseq":
            table = fairseq_table(config.max_positions, config.d_model, config.padding_id + 1)
            self.register_buffer("table", table, persistent=False)
        elif self.kind.startswith("sinusoidal"):
            table = sinusoidal_table(self.kind, config.max_positions, config.d_model)
            self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """positions broadcasts against tokens: [T], [B, T], or [B, 1] for one position per request."""
        x: Tensor = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.projection is not None:
            x = self.projection(x)
        if self.kind == "learned":
            x = x + F.embedding(positions, self.table)
        elif self.kind.endswith("_fairseq"):  # the first row is the padding token's, which has no position
            x = x + self.table[torch.where(tokens == self.padding_id, 0, positions + 1)]
        elif self.kind.startswith("sinusoidal"):
            # Indexed, so that it is not taken for an embedding whose rows may be rounded to 8 bits.
            x = x + self.table[positions]
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)  # type: ignore[no-any-return]

    def angles(self, tokens: Tensor, positions: Tensor) -> tuple[Angles, ...]:
        """Of rotary positions, which are not added but turn queries and keys; for each of the tokens, by each table."""
        return tuple(table(positions.expand(tokens.shape)) for table in self.rotary)
