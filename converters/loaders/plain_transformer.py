"""A Transformer in a few plain lines, from tensors by fairseq's names: the original that the certificate of a fairseq
or OpenNMT-py checkpoint compares with, because neither toolkit can be installed beside us. It shares no code with the
modules that are exported; the tests hold it against Hugging Face's models and a copy of OpenNMT-py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from beamline.converters.modules.transformer.config import AttentionConfig, EncoderDecoderConfig, StackConfig

Positions = Callable[[Tensor], Tensor]  # tokens [B, T] -> what is added to their vectors
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class PlainTransformer:
    def __init__(
        self, config: EncoderDecoderConfig, tensors: Mapping[str, Tensor], positions: Mapping[str, Positions]
    ) -> None:
        self._config, self._tensors, self._positions = config, tensors, positions

    def __call__(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        seen = source_mask[:, None, None, :]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        memory = self._run("encoder", self._config.encoder, source, seen)
        hidden = self._run("decoder", self._config.decoder, target, causal, (memory, seen))
        bias = self._tensors.get("decoder.output_projection.bias")
        return F.linear(hidden, self._tensors["decoder.output_projection.weight"], bias)

    def _run(
        self,
        side: str,
        config: StackConfig,
        tokens: Tensor,
        mask: Tensor,
        memory: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The whole of one stack; of a decoder, `memory` is what the encoder found, and its mask."""
        x = F.embedding(tokens, self._tensors[f"{side}.embed_tokens.weight"]) * config.embedding_scale
        x = x + self._positions[side](tokens)
        if config.embedding_norm:
            x = self._norm(config, f"{side}.layernorm_embedding", x)
        for number in range(config.layers):
            at = f"{side}.layers.{number}"
            attention = partial(self._attention, config.attention, f"{at}.self_attn", None, mask)
            x = self._residual(config, f"{at}.self_attn_layer_norm", x, attention)
            if memory is not None and config.cross_attention is not None:
                attention = partial(self._attention, config.cross_attention, f"{at}.encoder_attn", *memory)
                x = self._residual(config, f"{at}.encoder_attn_layer_norm", x, attention)
            x = self._residual(config, f"{at}.final_layer_norm", x, partial(self._feed_forward, config, at))
        return self._norm(config, f"{side}.layer_norm", x) if config.norm.final else x

    def _residual(self, config: StackConfig, norm: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if config.norm.placement == "pre":
            return x + compute(self._norm(config, norm, x))
        return self._norm(config, norm, x + compute(x))

    def _attention(self, config: AttentionConfig, at: str, memory: Tensor | None, mask: Tensor, x: Tensor) -> Tensor:
        """To `memory`, or to itself."""

        def heads(name: str, of: Tensor, count: int) -> Tensor:
            projected = self._linear(f"{at}.{name}", of)
            split = projected.reshape(*projected.shape[:2], count, config.head_width).transpose(1, 2)
            return split.repeat_interleave(config.heads // count, dim=1)

        keys = x if memory is None else memory
        query = heads("q_proj", x, config.heads)
        key, value = heads("k_proj", keys, config.kv_heads), heads("v_proj", keys, config.kv_heads)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._linear(f"{at}.out_proj", attended.transpose(1, 2).flatten(2))

    def _feed_forward(self, config: StackConfig, at: str, x: Tensor) -> Tensor:
        inner = _ACTIVATIONS[config.feed_forward.activation](self._linear(f"{at}.fc1", x))
        if config.feed_forward.gated:
            inner = inner * self._linear(f"{at}.fc3", x)
        return self._linear(f"{at}.fc2", inner)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, config: StackConfig, name: str, x: Tensor) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        if config.norm.kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm.eps) * weight
        return F.layer_norm(x, weight.shape, weight, self._tensors[f"{name}.bias"], config.norm.eps)
