"""LayerNorm or RMSNorm, as a configuration says."""

from __future__ import annotations

from torch import nn

from beamline.converters.modules.transformer.config import NormConfig, StackConfig


def make_norm(config: NormConfig, width: int) -> nn.Module:
    return nn.RMSNorm(width, config.eps) if config.kind == "rms" else nn.LayerNorm(width, config.eps)


def make_final_norm(config: StackConfig) -> nn.Module:
    return make_norm(config.norm, config.d_model) if config.norm.final else nn.Identity()
