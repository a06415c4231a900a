"""Activations, feed-forward, and the layer that puts them and norms around attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.modules.transformer.attention import Angles, Attend, CrossAttention, SelfAttention
from beamline.converters.modules.transformer.config import FeedForwardConfig, StackConfig
from beamline.converters.modules.transformer.norms import make_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
CrossAttend = Callable[[CrossAttention, Tensor], Tensor]  # a layer's own module, and what asks [B, T, d] -> [B, T, d]


class FeedForward(nn.Module):
    """A gated one projects gate and up by one matrix."""

    def __init__(self, d_model: int, config: FeedForwardConfig, dropout: float) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        self.inner = nn.Linear(d_model, config.width * (2 if config.gated else 1), bias=config.bias)
        self.outer = nn.Linear(config.width, d_model, bias=config.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            active = self.activation(gate) * up
        else:
            active = self.activation(inner)
        return self.outer(self.dropout(active))  # type: ignore[no-any-return]


class OutputTransform(nn.Module):
    """What BERT does to the last hidden states before they are compared with words."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        assert config.output_transform is not None
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.output_transform]
        self.norm = make_norm(config.norm, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Of an encoder, a decoder with cross-attention, or a language model."""

    def __init__(self, config: StackConfig, memory_width: int) -> None:
        super().__init__()
        self.placement, self.parallel = config.norm.placement, config.parallel
        self.dropout = nn.Dropout(config.dropout)
        self.attention = SelfAttention(config.d_model, config.attention)
        self.attention_norm = make_norm(config.norm, config.d_model)
        self.cross_attention: CrossAttention | None = None
        if config.cross_attention is not None:
            self.cross_attention = CrossAttention(config.d_model, memory_width, config.cross_attention)
            self.cross_attention_norm = make_norm(config.norm, config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.feed_forward, config.dropout)
        self.feed_forward_norm = make_norm(config.norm, config.d_model)
        both = self.placement == "both"
        self.attention_output_norm = make_norm(config.norm, config.d_model) if both else None
        self.feed_forward_output_norm = make_norm(config.norm, config.d_model) if both else None

    def forward(self, x: Tensor, attend: Attend, angles: Angles | None, cross_attend: CrossAttend | None) -> Tensor:
        """How a position attends is the caller's: over a whole text at once, or over the cached tree."""
        if self.parallel:
            attended = self.attention(self.attention_norm(x), attend, angles)
            return x + attended + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]
        attention = partial(self.attention, attend=attend, angles=angles)
        x = self.sublayer(x, self.attention_norm, attention, self.attention_output_norm)
        cross = self.cross_attention
        if cross is not None:
            assert cross_attend is not None
            x = self.sublayer(x, self.cross_attention_norm, lambda y: cross_attend(cross, y))
        return self.sublayer(x, self.feed_forward_norm, self.feed_forward, self.feed_forward_output_norm)

    def sublayer(
        self, x: Tensor, norm: nn.Module, compute: Callable[[Tensor], Tensor], output_norm: nn.Module | None = None
    ) -> Tensor:
        """With its residual, and its norms where they belong."""
        if self.placement == "post":
            return norm(x + self.dropout(compute(x)))  # type: ignore[no-any-return]
        if self.placement == "output":
            return x + self.dropout(norm(compute(x)))  # type: ignore[no-any-return]
        computed = compute(norm(x))
        return x + self.dropout(computed if output_norm is None else output_norm(computed))  # type: ignore[no-any-return]


class Stack(nn.ModuleList):
    """The layers of an encoder or a decoder. `memory_width` is that of an encoder that they attend to."""

    def __init__(self, config: StackConfig, memory_width: int = 0) -> None:
        super().__init__(Layer(config, memory_width) for _ in range(config.layers))
        self.rotary_tables = config.rotary_tables or (0 if config.positions == "rotary" else None,) * config.layers

    def layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self)

    def run(
        self,
        x: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        angles: tuple[Angles, ...] = (),
        cross_attend: Callable[[int, CrossAttention, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """[B, T, d] -> [B, T, d], before the final norm. Both callables get the layer's number first."""
        for number, layer in enumerate(self.layers()):
            cross = None if cross_attend is None else partial(cross_attend, number)
            table = self.rotary_tables[number]
            x = layer(x, partial(attend, number), None if table is None else angles[table], cross)
        return x
