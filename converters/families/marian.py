"""Hugging Face Marian directories: weights, both sentencepiece models, and the decoding defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, MarianTokenizer
from transformers.utils import logging as transformers_logging

from beamline.converters.base import Converter, Loaded
from beamline.converters.checkpoint import fill, read_json, read_weights
from beamline.converters.conversion import TextSide
from beamline.converters.families.generation import decoding_defaults
from beamline.converters.families.reference import limits_of, vocabulary_of
from beamline.converters.modules.transformer import Transformer, TransformerConfig
from beamline.converters.modules.transformer_graphs import TransformerSteps
from beamline.converters.tokenization import ConvertedTokenizer, from_marian
from beamline.serving.errors import UnsupportedCheckpoint

_REQUIRED = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
_ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}


class MarianConverter(Converter):
    family = "marian"

    def load(self) -> Loaded:
        content = read_json(self.source / "config.json")
        generation_file = self.source / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else content
        reasons = _unsupported(content)
        missing = [name for name in ("source.spm", "target.spm", "vocab.json") if not (self.source / name).is_file()]
        reasons += [f"{name} is missing" for name in missing]
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)
        read_json(self.source / "vocab.json")  # the tokenizer's own complaint would not name the file
        tensors = read_weights(self.source)
        bias = tensors.pop("final_logits_bias", None)
        if bias is not None and not bias.any():
            bias = None  # as in every published model: adding nothing to the whole vocabulary takes time too
        config = transformer_config(content, tensors, output_bias=bias is not None)
        if config.problems():
            raise UnsupportedCheckpoint(str(self.source), config.problems())
        model = Transformer(config)
        fill(model, map_weights(tensors, config, None if bias is None else bias[0]), str(self.source))
        model.eval()

        vocabulary = vocabulary_of(config)
        eos_ids = generation.get("eos_token_id", config.eos_id)
        eos_ids = tuple(eos_ids) if isinstance(eos_ids, list) else (eos_ids,)
        limits = limits_of(config)
        source, target = from_marian(self.source)
        original = MarianTokenizer.from_pretrained(self.source, local_files_only=True)
        return Loaded(
            model=TransformerSteps(model),
            original=_original(self.source, content, tensors, bias),
            source_text=_MarianText(source, original, as_target=False),
            target_text=_MarianText(target, original, as_target=True),
            vocabulary=vocabulary.model_copy(update={"eos_ids": eos_ids}),
            limits=limits,
            defaults=decoding_defaults(generation, limits, str(self.source)),
            renormalise=bool(generation.get("renormalize_logits", False)),
            description=f"Hugging Face Marian model {content.get('_name_or_path', '')}".strip(),
        )


def _unsupported(content: dict[str, Any]) -> list[str]:
    """Every reason in the configuration."""
    reasons = [f"config.json: {name} is missing" for name in _REQUIRED if content.get(name) is None]
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = content.get(f"encoder_{name}"), content.get(f"decoder_{name}")
        if encoder != decoder:
            reasons.append(f"encoder_{name} is {encoder} and decoder_{name} is {decoder}; they must be equal")
    if content.get("activation_function", "gelu") not in _ACTIVATIONS:
        reasons.append(
            f"activation_function is {content.get('activation_function')!r}; supported: {', '.join(_ACTIVATIONS)}"
        )
    for name in ("normalize_before", "add_final_layer_norm", "normalize_embedding", "add_bias_logits"):
        if content.get(name):
            reasons.append(f"{name} is set")
    if content.get("static_position_embeddings") is False:
        reasons.append("static_position_embeddings is off: learned positions are not Marian's")
    return reasons


class _Embeddings:
    """Which tensor is which: what is shared or tied is stored under one name, or under several with equal content."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        def first(*names: str) -> Tensor:
            for name in names:
                if name in tensors:
                    return tensors[name]
            raise UnsupportedCheckpoint("the checkpoint", [f"{' or '.join(names)} is missing"])

        shared = "model.shared.weight"
        self.source = first("model.encoder.embed_tokens.weight", shared)
        self.target = first("model.decoder.embed_tokens.weight", shared)
        self.output = tensors.get("lm_head.weight", self.target)
        self.share = torch.equal(self.source, self.target)
        self.tie = torch.equal(self.target, self.output)


def transformer_config(content: dict[str, Any], tensors: dict[str, Tensor], output_bias: bool) -> TransformerConfig:
    vocabulary = content["vocab_size"]
    embeddings = _Embeddings(tensors)
    return TransformerConfig(
        source_vocab_size=vocabulary,
        target_vocab_size=content.get("decoder_vocab_size") or vocabulary,
        d_model=content["d_model"],
        heads=content["encoder_attention_heads"],
        encoder_layers=content["encoder_layers"],
        decoder_layers=content["decoder_layers"],
        ffn=content["encoder_ffn_dim"],
        pad_id=content["pad_token_id"],
        eos_id=content["eos_token_id"],
        decoder_start_id=content["decoder_start_token_id"],
        norm="post",
        final_norm=False,
        positions="sinusoidal_halves",
        max_positions=content.get("max_position_embeddings", 512),
        activation=_ACTIVATIONS[content.get("activation_function", "gelu")],
        scale_embedding=bool(content.get("scale_embedding", False)),
        share_embeddings=embeddings.share,
        tie_output=embeddings.tie,
        output_bias=output_bias,
        dropout=0.0,
    )


_RENAMES = (
    (r"self_attn\.out_proj", "attention.output"),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"encoder_attn\.q_proj", "cross_attention.query"),
    (r"encoder_attn\.out_proj", "cross_attention.output"),
    (r"encoder_attn_layer_norm", "cross_attention_norm"),
    (r"fc1", "feed_forward.inner"),
    (r"fc2", "feed_forward.outer"),
    (r"final_layer_norm", "feed_forward_norm"),
)
_JOINED = re.compile(r"(self_attn\.[qkv]|encoder_attn\.[kv])_proj\.(weight|bias)")  # see `_joined`
_LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.(.+)")


def map_weights(tensors: dict[str, Tensor], config: TransformerConfig, bias: Tensor | None) -> dict[str, Tensor]:
    embeddings = _Embeddings(tensors)
    mapped = {
        "source_embedding.tokens.weight": embeddings.source,
        "target_embedding.tokens.weight": embeddings.target,
        "output.weight": embeddings.output,
    }
    if bias is not None:
        mapped["output.bias"] = bias
    known = {"model.shared.weight", "lm_head.weight"}
    for name, tensor in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            if name not in known and not name.endswith(("embed_tokens.weight", "embed_positions.weight")):
                mapped[name] = tensor  # `fill` will report it
            continue
        layer, part = f"{found[1]}.{found[2]}", found[3]
        for theirs, ours in _RENAMES:
            if re.match(theirs + r"\.", part):
                mapped[f"{layer}.{re.sub('^' + theirs, ours, part)}"] = tensor
                break
        else:
            if not _JOINED.fullmatch(part):
                mapped[name] = tensor  # as above
    for stack, depth in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for number in range(depth):
            mapped.update(_joined(tensors, f"model.{stack}.layers.{number}", f"{stack}.{number}"))
    return mapped


def _joined(tensors: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Their separate projections as our wide ones."""
    joined = {}
    for attention, parts, name in (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), "attention.qkv"),
        ("encoder_attn", ("k_proj", "v_proj"), "cross_attention.key_value"),
    ):
        for kind in ("weight", "bias"):
            names = [f"{theirs}.{attention}.{part}.{kind}" for part in parts]
            if all(part in tensors for part in names):
                joined[f"{ours}.{name}.{kind}"] = torch.cat([tensors[part] for part in names])
    return joined


def _original(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor], bias: Tensor | None) -> Any:
    """The model as Hugging Face runs it."""
    transformers_logging.disable_progress_bar()
    model = MarianMTModel(MarianConfig(**content))
    state = tensors if bias is None else {**tensors, "final_logits_bias": bias}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.eval()

    def logits(source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        found = model(input_ids=source, attention_mask=source_mask.long(), decoder_input_ids=target, use_cache=False)
        return found.logits  # type: ignore[no-any-return]

    return logits


class _MarianText(TextSide):
    def __init__(self, converted: ConvertedTokenizer, original: Any, *, as_target: bool) -> None:
        self._converted = converted
        self._original = original
        self._as_target = as_target

    def save(self, path: Path) -> None:
        self._converted.save(path)

    def encode(self, text: str) -> list[int]:
        found = self._original(text_target=text) if self._as_target else self._original(text)
        return list(found["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._original.decode(ids, skip_special_tokens=True))
