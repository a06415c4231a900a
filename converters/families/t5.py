"""Hugging Face T5 in all its forms: T5, v1.1, FLAN, mT5, ByT5, UMT5, MADLAD.

What is special is folded into the weights: attention has no scale (our queries are longer by what attention divides
them by), and a tied output may be scaled (our last norm is). Relative positions come in buckets; ours are a table of
distances.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.loaders.seq2seq import Seq2SeqConverter, Text
from beamline.converters.loaders.translation_tokens import text_with_target_tokens
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    RelativeConfig,
    StackConfig,
)

_POSITIONS = 1024  # where a checkpoint names no limit: relative positions have none, memory has
_MADLAD_LANGUAGE = re.compile(r"<2([a-z]{2,3}(?:_[A-Z][a-z]{3})?)>")
_SOURCE, _TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
_BIAS = "{side}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"


class T5Converter(Seq2SeqConverter):
    family = "t5"  # until its own name has been read
    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5", "umt5")
    description = "Hugging Face T5, FLAN-T5, mT5, ByT5, UMT5 and MADLAD directories"

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        return wrong_activation(config, "dense_act_fn")

    @classmethod
    def architecture(cls, config: Any, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
        attention = AttentionConfig(config.num_heads, config.d_kv, config.num_heads, qkv_bias=False, output_bias=False)

        def stack(side: str, layers: int) -> StackConfig:
            return StackConfig(
                vocab_size=tensors[_TARGET].shape[0],
                d_model=config.d_model,
                layers=layers,
                attention=attention,
                cross_attention=attention if side == "decoder" else None,
                feed_forward=FeedForwardConfig(
                    config.d_ff, ACTIVATIONS[config.dense_act_fn], gated=config.is_gated_act, bias=False
                ),
                norm=NormConfig("rms", config.layer_norm_epsilon),
                positions="none",
                max_positions=getattr(config, "n_positions", None) or _POSITIONS,
                relative=RelativeConfig(config.relative_attention_max_distance, per_layer=config.model_type == "umt5"),
            )

        return EncoderDecoderConfig(
            encoder=stack("encoder", config.num_layers),
            decoder=stack("decoder", config.num_decoder_layers),
            share_embeddings=torch.equal(tensors[_SOURCE], tensors[_TARGET]),
            tie_output=torch.equal(tensors[_TARGET], tensors["lm_head.weight"]),
        )

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        last_norm = tensors["decoder.final_layer_norm.weight"]
        if _scales_output(config):
            last_norm = last_norm * config.d_model**-0.5
        mapped = {
            "source_embedding.tokens.weight": tensors[_SOURCE],
            "target_embedding.tokens.weight": tensors[_TARGET],
            "output.weight": tensors["lm_head.weight"],
            "encoder_norm.weight": tensors["encoder.final_layer_norm.weight"],
            "decoder_norm.weight": last_norm,
        }
        for side, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
            biases = [name for layer in range(layers) if (name := _BIAS.format(side=side, layer=layer)) in tensors]
            tables = [_by_distance(config, tensors[name], both_ways=side == "encoder") for name in biases]
            mapped[f"{side}_bias.table"] = torch.stack(tables)
            for layer in range(layers):
                mapped |= _layer(config, tensors, side, layer)
        return mapped

    def text(self, tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> Text:
        return text_with_target_tokens(tokenizer, _MADLAD_LANGUAGE)


def _scales_output(config: Any) -> bool:
    """Whether logits are multiplied by d_model ** -0.5; each type has its own way to say it."""
    if config.model_type == "t5":
        return bool(config.scale_decoder_outputs)
    return config.model_type == "umt5" and bool(config.tie_word_embeddings)


def _layer(config: Any, tensors: Mapping[str, Tensor], side: str, layer: int) -> dict[str, Tensor]:
    theirs, ours = f"{side}.block.{layer}.layer", f"{side}.{layer}"
    scale = math.sqrt(config.d_kv)

    def attention(number: int, name: str) -> dict[str, Tensor]:
        return {part: tensors[f"{theirs}.{number}.{name}.{part}.weight"] for part in "qkvo"}

    own = attention(0, "SelfAttention")
    mapped = {
        f"{ours}.attention_norm.weight": tensors[f"{theirs}.0.layer_norm.weight"],
        f"{ours}.attention.qkv.weight": torch.cat([own["q"] * scale, own["k"], own["v"]]),
        f"{ours}.attention.output.weight": own["o"],
    }
    last = 1
    if side == "decoder":
        last, cross = 2, attention(1, "EncDecAttention")
        mapped |= {
            f"{ours}.cross_attention_norm.weight": tensors[f"{theirs}.1.layer_norm.weight"],
            f"{ours}.cross_attention.query.weight": cross["q"] * scale,
            f"{ours}.cross_attention.key_value.weight": torch.cat([cross["k"], cross["v"]]),
            f"{ours}.cross_attention.output.weight": cross["o"],
        }
    dense = f"{theirs}.{last}.DenseReluDense"
    inner = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    mapped[f"{ours}.feed_forward_norm.weight"] = tensors[f"{theirs}.{last}.layer_norm.weight"]
    mapped[f"{ours}.feed_forward.inner.weight"] = torch.cat([tensors[f"{dense}.{each}.weight"] for each in inner])
    mapped[f"{ours}.feed_forward.outer.weight"] = tensors[f"{dense}.wo.weight"]
    return mapped


def _by_distance(config: Any, weights: Tensor, *, both_ways: bool) -> Tensor:
    """Their numbers per bucket [buckets, heads] -> ours, from the furthest key before to the furthest behind."""
    from transformers.models.t5.modeling_t5 import T5Attention

    furthest = config.relative_attention_max_distance
    buckets = T5Attention._relative_position_bucket(
        torch.arange(-furthest, (furthest if both_ways else 0) + 1),
        bidirectional=both_ways,
        num_buckets=config.relative_attention_num_buckets,
        max_distance=furthest,
    )
    return weights[buckets]
