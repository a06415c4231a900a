"""The reference Transformer: trained as it is, and the shape that every Transformer loader maps onto.

Queries, keys and values are projected by one matrix, because one wide product is faster than
three narrow ones, and because `torch.nn.MultiheadAttention` stores them that way too.
Shapes in comments: B requests, S source positions, T target positions, d model width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.initial import reset

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
POSITIONS = ("sinusoidal", "sinusoidal_halves", "learned")


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that shapes the network, and the ids it was trained with."""

    source_vocab_size: int
    target_vocab_size: int
    d_model: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    ffn: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    norm: str = "pre"  # pre: normalise what enters a sublayer; post: the sum that leaves it
    final_norm: bool = True  # one more norm after the last layer of either stack
    positions: str = "sinusoidal"  # sin/cos interleaved, in two halves, or learned
    max_positions: int = 256
    activation: str = "relu"
    scale_embedding: bool = True  # by sqrt(d_model)
    share_embeddings: bool = True  # source and target
    tie_output: bool = True  # the target embedding is the output projection
    output_bias: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.1

    def problems(self) -> list[str]:
        """Every reason why this configuration can't be built, in sentences."""
        found = []
        if self.heads >= 1 and self.d_model % self.heads:
            found.append(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.norm not in ("pre", "post"):
            found.append(f"norm is {self.norm!r}; allowed: 'pre', 'post'")
        if self.positions not in POSITIONS:
            found.append(f"positions is {self.positions!r}; allowed: {', '.join(map(repr, POSITIONS))}")
        if self.activation not in ACTIVATIONS:
            found.append(f"activation is {self.activation!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
        if self.share_embeddings and self.source_vocab_size != self.target_vocab_size:
            found.append(
                "share_embeddings needs one vocabulary, but source_vocab_size is "
                f"{self.source_vocab_size} and target_vocab_size is {self.target_vocab_size}"
            )
        if self.d_model % 2 and self.positions != "learned":
            found.append(f"sinusoidal positions need an even d_model, not {self.d_model}")
        for name in ("source_vocab_size", "target_vocab_size", "d_model", "heads", "ffn"):
            if getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_positions < 2:
            found.append(f"max_positions is {self.max_positions}; a start and an end need 2")
        if self.encoder_layers < 1 or self.decoder_layers < 1:
            found.append("encoder_layers and decoder_layers must be at least 1")
        for name in ("pad_id", "eos_id", "decoder_start_id"):
            if not 0 <= getattr(self, name) < self.target_vocab_size:
                found.append(f"{name} is {getattr(self, name)}, outside the vocabulary")
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def field_names(cls) -> set[str]:
        return {field.name for field in fields(cls)}


def position_table(kind: str, length: int, width: int) -> Tensor:
    """Sinusoidal positions [length, width]."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    if kind == "sinusoidal_halves":
        return torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.stack([angles.sin(), angles.cos()], dim=2).reshape(length, width)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, d] -> [B, H, T, d/H]"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def visible_to_all(mask: Tensor, queries: Tensor) -> Tensor:
    """A mask [B, S] over keys -> [B, 1, T, S], the same for every query of [B, T, ...]. Written out for each query,
    because ONNX Runtime's Attention does not broadcast that axis."""
    return mask[:, None, None, :].expand(-1, -1, queries.shape[1], -1)


def join_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H*D]"""
    batch, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * width)


class SelfAttention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return split_heads(query, self.heads), split_heads(key, self.heads), split_heads(value, self.heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return self.attend(query, key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(join_heads(mixed))  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key_value = nn.Linear(config.d_model, 2 * config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output [B, S, d] -> keys and values [B, H, S, D], once per request."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return split_heads(key, self.heads), split_heads(value, self.heads)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(join_heads(mixed))  # type: ignore[no-any-return]

    def weights(self, x: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """The attention itself [B, H, T, S], written out because fused kernels don't return it."""
        query = split_heads(self.query(x), self.heads)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return torch.where(mask, scores, -1e9).softmax(-1)


class FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.ffn)
        self.outer = nn.Linear(config.ffn, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.activation(self.inner(x))))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """What both stacks share: a sublayer with its residual and its norm, before or after."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.dropout = nn.Dropout(config.dropout)

    def sublayer(self, x: Tensor, norm: nn.Module, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + self.dropout(compute(norm(x)))  # type: ignore[no-any-return]
        return norm(x + self.dropout(compute(x)))  # type: ignore[no-any-return]


class EncoderLayer(Layer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer(x, self.attention_norm, lambda y: self.attention(y, mask))
        return self.sublayer(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(Layer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.cross_attention = CrossAttention(config)
        self.cross_attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        self_attend: Callable[[Tensor], Tensor],
        cross_attend: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """How a position attends is the caller's: over a whole target at once, or over the cached tree."""
        x = self.sublayer(x, self.attention_norm, self_attend)
        x = self.sublayer(x, self.cross_attention_norm, cross_attend)
        return self.sublayer(x, self.feed_forward_norm, self.feed_forward)


class Embedding(nn.Module):
    """Tokens and their positions -> [B, T, d]."""

    def __init__(self, config: TransformerConfig, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        if config.positions == "learned":
            self.table: Tensor = nn.Parameter(torch.randn(config.max_positions, config.d_model) * 0.02)
        else:
            table = position_table(config.positions, config.max_positions, config.d_model)
            self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """positions broadcasts against tokens: [T], or [B, 1] for one position per request."""
        return self.dropout(self.tokens(tokens) * self.scale + self.table[positions])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        target = nn.Embedding(config.target_vocab_size, config.d_model)
        source = target if config.share_embeddings else nn.Embedding(config.source_vocab_size, config.d_model)
        self.source_embedding = Embedding(config, source)
        self.target_embedding = Embedding(config, target)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        norm = (lambda: nn.LayerNorm(config.d_model, config.norm_eps)) if config.final_norm else nn.Identity
        self.encoder_norm, self.decoder_norm = norm(), norm()
        self.output = nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias)
        reset(self, config.d_model)
        if config.tie_output:
            self.output.weight = target.weight

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.decoder))

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """source [B, S], source_mask [B, S] (true where there is a token) -> [B, S, d]"""
        x = self.source_embedding(source, torch.arange(source.shape[1], device=source.device))
        visible = visible_to_all(source_mask, source)
        for layer in self.encoder:
            x = layer(x, visible)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self, memory: Tensor, source_mask: Tensor, target: Tensor, attention_of: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A whole target under a causal mask: the last hidden states [B, T, d], and the attention [B, T, S] that one
        layer paid to the source, its heads averaged, if it is asked for."""
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        causal = causal.expand(target.shape[0], 1, length, length)
        visible = visible_to_all(source_mask, target)
        paid: Tensor | None = None

        x = self.target_embedding(target, torch.arange(length, device=target.device))
        for number, layer in enumerate(self.decoder_layers):
            cross = layer.cross_attention
            key, value = cross.project_memory(memory)

            def self_attend(y: Tensor, attention: SelfAttention = layer.attention) -> Tensor:
                return attention(y, causal)  # type: ignore[no-any-return]

            def cross_attend(
                y: Tensor, number: int = number, cross: CrossAttention = cross, key: Tensor = key, value: Tensor = value
            ) -> Tensor:
                nonlocal paid
                if number == attention_of:
                    paid = cross.weights(y, key, visible).mean(1)
                return cross(y, key, value, visible)  # type: ignore[no-any-return]

            x = layer(x, self_attend, cross_attend)
        return self.decoder_norm(x), paid

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: logits [B, T, V] for what follows each position of `target`."""
        hidden, _ = self.decode(self.encode(source, source_mask), source_mask, target)
        return self.output(hidden)  # type: ignore[no-any-return]

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor, attention_of: int) -> tuple[Tensor, Tensor]:
        """Teacher forcing with the attention that layer `attention_of` paid to the source."""
        hidden, attention = self.decode(self.encode(source, source_mask), source_mask, target, attention_of)
        assert attention is not None, f"there is no decoder layer {attention_of}"
        return self.output(hidden), attention
