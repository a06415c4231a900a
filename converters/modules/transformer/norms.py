"""LayerNorm or RMSNorm, as a configuration says; and those of queries and keys inside attention.

Shapes in comments: B requests, T positions, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.transformer.config import AttentionConfig, NormConfig, StackConfig


def make_norm(config: NormConfig, width: int) -> nn.Module:
    return nn.RMSNorm(width, config.eps) if config.kind == "rms" else nn.LayerNorm(width, config.eps)


def make_final_norm(config: StackConfig) -> nn.Module:
    return make_norm(config.norm, config.d_model) if config.norm.final else nn.Identity()


class HeadNorm(nn.Module):
    """Each head of queries and keys alone. They lie side by side, so all have a row of weights."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.heads + config.kv_heads, config.head_width))

    def forward(self, query_key: Tensor) -> Tensor:
        """[B, T, (H+G)*D] -> the same"""
        heads = query_key.unflatten(-1, self.weight.shape)  # type: ignore[no-untyped-call]
        return (F.rms_norm(heads, self.weight.shape[-1:], eps=self.eps) * self.weight).flatten(-2)


class WidthNorm(nn.Module):
    """All heads of the queries together, and all of the keys."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.query = nn.RMSNorm(config.query_width, config.norm_eps)
        self.key = nn.RMSNorm(config.kv_width, config.norm_eps)

    def forward(self, query_key: Tensor) -> Tensor:
        """[B, T, (H+G)*D] -> the same"""
        widths = (self.query.normalized_shape[0], self.key.normalized_shape[0])
        query, key = query_key.split(widths, dim=-1)  # type: ignore[no-untyped-call]
        return torch.cat([self.query(query), self.key(key)], dim=-1)


def make_query_key_norm(config: AttentionConfig) -> nn.Module | None:
    kinds = {"none": None, "head": HeadNorm, "width": WidthNorm}
    kind = kinds[config.query_key_norm]
    return None if kind is None else kind(config)
