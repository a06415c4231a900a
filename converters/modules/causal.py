"""The decoder-only Transformer: the shape that every language model loader maps onto.

Pre-norm throughout. GPT-2 is LayerNorm, learned positions and a plain feed-forward; Llama is RMSNorm, rotary
positions, fewer key heads than query heads and a gated feed-forward; what lies between is a matter of configuration.
Shapes in comments: B requests, T positions, d model width, H query heads, G key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.transformer import join_heads, split_heads

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query [B, H, T, D], new keys and values [B, G, T, D] -> as query


@dataclass(frozen=True)
class CausalConfig:
    """Everything that shapes the network."""

    vocab_size: int
    d_model: int
    heads: int
    kv_heads: int
    head_width: int
    layers: int
    ffn: int
    max_positions: int
    rms_norm: bool  # otherwise LayerNorm
    norm_eps: float
    rotary: bool  # otherwise learned positions
    gated: bool  # activation(gate) * up, otherwise activation alone
    activation: str
    qkv_bias: bool
    output_bias: bool  # of the attention
    ffn_bias: bool
    tie_output: bool

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        sizes = ("vocab_size", "d_model", "heads", "kv_heads", "head_width", "layers", "ffn")
        found = [f"{name} is {getattr(self, name)}; it must be at least 1" for name in sizes if getattr(self, name) < 1]
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a prompt and an answer need 2")
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.rotary and self.head_width % 2:
            found.append(f"rotary positions need an even head_width, not {self.head_width}")
        if self.activation not in ACTIVATIONS:
            found.append(f"activation is {self.activation!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
        return found


def _norm(config: CausalConfig) -> nn.Module:
    kind = nn.RMSNorm if config.rms_norm else nn.LayerNorm
    return kind(config.d_model, config.norm_eps)


def _split(x: Tensor, sizes: tuple[int, int], dim: int) -> tuple[Tensor, Tensor]:
    first, second = x.split(sizes, dim=dim)  # type: ignore[no-untyped-call]
    return first, second


@dataclass(frozen=True)
class Angles:
    """By how much the positions of this pass are turned."""

    cos: Tensor  # [B, T, D/2]
    sin: Tensor


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
        """frequencies [D/2], by whatever rule a checkpoint has for long texts; `scaling` multiplies what is turned."""
        angles = torch.arange(self.positions).float()[:, None] * frequencies.float()
        self.cos, self.sin = angles.cos() * scaling, angles.sin() * scaling

    def forward(self, positions: Tensor) -> Angles:
        return Angles(F.embedding(positions, self.cos), F.embedding(positions, self.sin))


class CausalAttention(nn.Module):
    """One matrix projects to queries, keys and values; queries and keys lie side by side, to be turned together."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.qkv = nn.Linear(config.d_model, queries + 2 * keys, bias=config.qkv_bias)
        self.output = nn.Linear(queries, config.d_model, bias=config.output_bias)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, d] -> [B, H, T, D] and twice [B, G, T, D]"""
        turned = self.heads + self.kv_heads
        query_key, value = _split(self.qkv(x), (turned * self.head_width, self.kv_heads * self.head_width), dim=-1)
        if angles is not None:
            query_key = torch.onnx.ops.rotary_embedding(query_key, angles.cos, angles.sin, num_heads=turned)
        query, key = _split(split_heads(query_key, turned), (self.heads, self.kv_heads), dim=1)
        return query, key, split_heads(value, self.kv_heads)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """All keys and values, and a mask [B, 1, T, C]. Each key head answers several query heads."""
        grouped = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

    def forward(self, x: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        return self.output(join_heads(attend(*self.project(x, angles))))  # type: ignore[no-any-return]


class CausalFeedForward(nn.Module):
    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        self.inner = nn.Linear(config.d_model, config.ffn * (1 + config.gated), bias=config.ffn_bias)
        self.outer = nn.Linear(config.ffn, config.d_model, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.outer(self.activation(gate) * up)  # type: ignore[no-any-return]
        return self.outer(self.activation(inner))  # type: ignore[no-any-return]


class CausalLayer(nn.Module):
    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = CausalAttention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = CausalFeedForward(config)

    def forward(self, x: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        """What a position attends to is the caller's: a whole text at once, or the cached tree."""
        x = x + self.attention(self.attention_norm(x), angles, attend)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class CausalTransformer(nn.Module):
    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = None if config.rotary else nn.Embedding(config.max_positions, config.d_model)
        self.rotary = Rotary(config.max_positions, config.head_width) if config.rotary else None
        self.layers = nn.ModuleList(CausalLayer(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_output:
            self.output.weight = self.embedding.weight

    @property
    def causal_layers(self) -> list[CausalLayer]:
        return cast(list[CausalLayer], list(self.layers))

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Angles | None]:
        """tokens and positions [B, T] -> [B, T, d], and the angles where positions are rotary."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        return x, None if self.rotary is None else self.rotary(positions)

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole texts from their beginning: logits [B, T, V] for what follows each token."""
        batch, length = tokens.shape
        places = torch.arange(length)
        causal = (places[None, :] <= places[:, None]).expand(batch, 1, length, length)
        x, angles = self.embed(tokens, places.expand(batch, length))
        for layer in self.causal_layers:
            x = layer(x, angles, partial(layer.attention.mix, mask=causal))
        return self.output(self.norm(x))  # type: ignore[no-any-return]
