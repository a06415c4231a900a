"""The names of BERT, which RoBERTa and its kin share; they differ in how they count positions and call their output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beamline.converters.loaders.hugging_face import ACTIVATIONS, wrong_activation
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
    uneven_heads,
)


@dataclass(frozen=True)
class Kin:
    prefix: str  # of the model below a decoder's output
    dense: str  # of that output
    norm: str
    output: str
    after_padding: bool = False  # positions are counted from behind the padding token's id, as fairseq does


_ROBERTA = Kin("roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", after_padding=True)
_BERT_HEAD = "cls.predictions"
BERT_KIN = {
    "bert": Kin("bert", f"{_BERT_HEAD}.transform.dense", f"{_BERT_HEAD}.transform.LayerNorm", f"{_BERT_HEAD}.decoder"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
}
_LAYER = {
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "crossattention.self.query": "cross_attention.query",
    "crossattention.output.dense": "cross_attention.output",
    "crossattention.output.LayerNorm": "cross_attention_norm",
    "intermediate.dense": "feed_forward.inner",
    "output.dense": "feed_forward.outer",
    "output.LayerNorm": "feed_forward_norm",
}
_JOINED = {
    "attention.qkv": [f"attention.self.{part}" for part in ("query", "key", "value")],
    "cross_attention.key_value": [f"crossattention.self.{part}" for part in ("key", "value")],
}


def bert_problems(config: Any) -> list[str]:
    reasons = [*wrong_activation(config, "hidden_act"), *uneven_heads(config.hidden_size, config.num_attention_heads)]
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        reasons.append(f"position_embedding_type is {positions!r}; supported: 'absolute'")
    return reasons


def bert_stack(config: Any, *, decoder: bool = False) -> StackConfig:
    kin = BERT_KIN[config.model_type]
    attention = AttentionConfig.even(config.hidden_size, config.num_attention_heads)
    activation = ACTIVATIONS[config.hidden_act]
    skipped = config.pad_token_id + 1 if kin.after_padding else 0
    transform = "gelu" if kin is _ROBERTA else activation
    return StackConfig(
        vocab_size=config.vocab_size,
        d_model=config.hidden_size,
        layers=config.num_hidden_layers,
        attention=attention,
        cross_attention=attention if decoder else None,
        feed_forward=FeedForwardConfig(config.intermediate_size, activation),
        norm=NormConfig(eps=config.layer_norm_eps, placement="post", final=False),
        positions="learned_fairseq" if kin.after_padding else "learned",
        max_positions=config.max_position_embeddings - skipped,
        padding_id=config.pad_token_id or 0,
        embedding_norm=True,
        output_transform=transform if decoder else None,
    )


def map_bert(config: Any, tensors: Mapping[str, Tensor], base: str, embedding: str, stack: str) -> dict[str, Tensor]:
    """All but tokens and output, by the names of an `EncoderDecoderTransformer`. A text is of one part here, whose
    embedding is the same for every token: it is added to the positions."""
    positions = tensors[f"{base}.embeddings.position_embeddings.weight"]
    if BERT_KIN[config.model_type].after_padding:
        positions = positions[config.pad_token_id :]
    table = positions + tensors[f"{base}.embeddings.token_type_embeddings.weight"][0]
    mapped = {f"{embedding}.table": table}
    for kind in ("weight", "bias"):
        mapped[f"{embedding}.norm.{kind}"] = tensors[f"{base}.embeddings.LayerNorm.{kind}"]
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"{base}.encoder.layer.{layer}", f"{stack}.{layer}"
        for kind in ("weight", "bias"):
            for part, name in _LAYER.items():
                if f"{theirs}.{part}.{kind}" in tensors:  # an encoder has no cross-attention
                    mapped[f"{ours}.{name}.{kind}"] = tensors[f"{theirs}.{part}.{kind}"]
            for name, parts in _JOINED.items():
                found = [f"{theirs}.{part}.{kind}" for part in parts]
                if found[0] in tensors:
                    mapped[f"{ours}.{name}.{kind}"] = torch.cat([tensors[each] for each in found])
    return mapped


def map_bert_head(config: Any, tensors: Mapping[str, Tensor], base: str) -> dict[str, Tensor]:
    kin = BERT_KIN[config.model_type]
    mapped = {"output.bias": tensors[f"{base}.{kin.output}.bias"]}
    for kind in ("weight", "bias"):
        mapped[f"decoder_norm.dense.{kind}"] = tensors[f"{base}.{kin.dense}.{kind}"]
        mapped[f"decoder_norm.norm.{kind}"] = tensors[f"{base}.{kin.norm}.{kind}"]
    return mapped
