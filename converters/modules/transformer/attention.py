"""Attention with heads of any width, biases by choice, and fewer key heads than query heads.

Queries, keys and values are projected by one matrix, because one wide product is faster than three narrow ones.
Shapes in comments: B requests, S source positions, T positions, C keys, d model width, H query heads, G key heads,
D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.transformer.config import AttentionConfig
from beamline.converters.modules.transformer.norms import make_query_key_norm

# query [B, H, T, D], new keys and values [B, G, T, D] -> [B, H, T, D]: what a position attends to is the caller's
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H*D] -> [B, H, T, D]"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H*D]"""
    batch, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * width)


def visible_to_all(mask: Tensor, queries: Tensor) -> Tensor:
    """A mask [B, S] over keys -> [B, 1, T, S], the same for every query of [B, T, ...]. Written out for each query,
    because ONNX Runtime's Attention does not broadcast that axis."""
    return mask[:, None, None, :].expand(-1, -1, queries.shape[1], -1)


def causal_mask(tokens: Tensor) -> Tensor:
    """[B, 1, T, T] for tokens [B, T]: a position sees itself and what stands before it."""
    batch, length = tokens.shape
    places = torch.arange(length, device=tokens.device)
    return (places[None, :] <= places[:, None]).expand(batch, 1, length, length)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float | None = None) -> Tensor:
    """query [B, H, T, D], all keys and values [B, G, C, D], mask [B, 1, T, C] -> [B, H, T, D]. Where there are fewer
    key heads, each answers several query heads."""
    if softcap is not None:
        return _attend_capped(query, key, value, mask, softcap)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _attend_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float) -> Tensor:
    """Written out: TensorRT has no attention with a cap. The queries of a key head stand below each other, so that no
    key is copied."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * length, width)
    scores = (grouped @ key.transpose(-1, -2)) * (1 / (softcap * math.sqrt(width)))
    scores = scores.reshape(batch, heads, length, key.shape[2]).tanh() * softcap
    paid = torch.where(mask, scores, -torch.inf).softmax(-1)
    attended = paid.reshape(batch, kv_heads, heads // kv_heads * length, key.shape[2]) @ value
    return attended.reshape(query.shape)


@dataclass(frozen=True)
class Angles:
    """By how much rotary positions turn the queries and keys of this pass."""

    cos: Tensor  # [B, T, D/2]
    sin: Tensor


class SelfAttention(nn.Module):
    """Queries and keys lie side by side in the product, so that rotary positions turn them together."""

    def __init__(self, d_model: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(d_model, config.query_width + 2 * config.kv_width, bias=config.qkv_bias)
        self.query_key_norm = make_query_key_norm(config)
        self.output = nn.Linear(config.query_width, d_model, bias=config.output_bias)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, d] -> [B, H, T, D] and twice [B, G, T, D]"""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        rotary_heads = heads + kv_heads
        query_key, value = _split(self.qkv(x), (rotary_heads * self.config.head_width, self.config.kv_width), dim=-1)
        if self.query_key_norm is not None:
            query_key = self.query_key_norm(query_key)
        if angles is not None:
            query_key = torch.onnx.ops.rotary_embedding(query_key, angles.cos, angles.sin, num_heads=rotary_heads)
        query, key = _split(split_heads(query_key, rotary_heads), (heads, kv_heads), dim=1)
        return query, key, split_heads(value, kv_heads)

    def forward(self, x: Tensor, attend: Attend, angles: Angles | None = None) -> Tensor:
        return self.output(join_heads(attend(*self.project(x, angles))))  # type: ignore[no-any-return]


class CrossAttention(nn.Module):
    def __init__(self, d_model: int, memory_width: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(d_model, config.query_width, bias=config.qkv_bias)
        self.key_value = nn.Linear(memory_width, 2 * config.kv_width, bias=config.qkv_bias)
        self.output = nn.Linear(config.query_width, d_model, bias=config.output_bias)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output [B, S, d] -> keys and values [B, G, S, D], once per request."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return split_heads(key, self.config.kv_heads), split_heads(value, self.config.kv_heads)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.config.heads)
        return self.output(join_heads(attend(query, key, value, mask)))  # type: ignore[no-any-return]

    def weights(self, x: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """The attention itself [B, H, T, S], written out because fused kernels don't return it."""
        query = split_heads(self.query(x), self.config.heads)
        if self.config.heads != self.config.kv_heads:
            key = key.repeat_interleave(self.config.heads // self.config.kv_heads, dim=1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return torch.where(mask, scores, -1e9).softmax(-1)


def _split(x: Tensor, sizes: tuple[int, int], dim: int) -> tuple[Tensor, Tensor]:
    first, second = x.split(sizes, dim=dim)  # type: ignore[no-untyped-call]
    return first, second
