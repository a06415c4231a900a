"""Hugging Face Marian directories: weights, both sentencepiece models, and the decoding defaults."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.files import fill, read_json, read_weights
from beamline.converters.checkpoints.generation_config import decoding_defaults
from beamline.converters.checkpoints.sentencepiece_files import ConvertedTokenizer, from_marian, marian_original
from beamline.converters.checkpoints.tokenizers import OriginalTokenizer
from beamline.converters.loaders.bart_weights import map_layers
from beamline.converters.loaders.reference import limits_for
from beamline.converters.loaders.translation_tokens import bcp47, target_in_source
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
    uneven_heads,
)
from beamline.converters.modules.transformer.encoder_decoder import EncoderDecoderTransformer
from beamline.converters.modules.transformer.steps import EncoderDecoderSteps
from beamline.converters.tasks.generation import GenerationConverter, LoadedModel
from beamline.serving.contract.manifest import Vocabulary
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
_LANGUAGE = re.compile(r">>(.+)<<")  # what a source begins with, where a model has several target languages
_ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}


class MarianConverter(GenerationConverter):
    family = "marian"
    model_types: ClassVar[tuple[str, ...]] = ("marian",)
    description = "Hugging Face Marian directories: OPUS-MT and its kin"

    def load(self) -> LoadedModel:
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
        config = architecture(content, tensors, output_bias=bias is not None)
        reasons = _misfits(content, config)
        if reasons:
            raise UnsupportedCheckpoint(str(self.source), reasons)
        model = EncoderDecoderTransformer(config)
        fill(model, map_weights(tensors, config, None if bias is None else bias[0]), str(self.source))
        model.eval()

        eos_ids = generation.get("eos_token_id", content["eos_token_id"])
        eos_ids = tuple(eos_ids) if isinstance(eos_ids, list) else (eos_ids,)
        limits = limits_for(config.decoder.max_positions, config.decoder.vocab_size)
        source, target = from_marian(self.source)
        original = marian_original(self.source)
        languages = target_in_source(_target_languages(original.encoder))
        return LoadedModel(
            model=EncoderDecoderSteps(model),
            original=_original(self.source, content, tensors, bias),
            source_tokenizer=_MarianTokenizer(source, original, as_target=False),
            target_tokenizer=_MarianTokenizer(target, original, as_target=True),
            vocabulary=vocabulary_of(content, config).model_copy(update={"eos_ids": eos_ids}),
            limits=limits,
            defaults=decoding_defaults(generation, limits, str(self.source)),
            renormalise=bool(generation.get("renormalize_logits", False)),
            languages=languages,
            target_languages=() if languages is None else tuple(each.code for each in languages.target),
            description=f"Hugging Face Marian model {content.get('_name_or_path', '')}".strip(),
        )


def _target_languages(vocabulary: dict[str, int]) -> dict[str, int]:
    """Some of these tokens name no language but a style or a source, and some models have one that is never used."""
    found = {match[1]: index for word, index in vocabulary.items() if (match := _LANGUAGE.fullmatch(word))}
    return {code: index for code, index in found.items() if bcp47(code)}


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


def _misfits(content: dict[str, Any], config: EncoderDecoderConfig) -> list[str]:
    """Every reason in the numbers."""
    reasons = [*uneven_heads(config.decoder.d_model, content["encoder_attention_heads"]), *config.problems()]
    for name in ("pad", "eos", "decoder_start"):
        if not 0 <= content[f"{name}_token_id"] < config.decoder.vocab_size:
            reasons.append(f"{name}_id is {content[f'{name}_token_id']}, outside the vocabulary")
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


def architecture(content: dict[str, Any], tensors: dict[str, Tensor], output_bias: bool) -> EncoderDecoderConfig:
    embeddings = _Embeddings(tensors)
    d_model = content["d_model"]

    def stack(side: str, vocab_size: int) -> StackConfig:
        attention = AttentionConfig.even(d_model, content[f"{side}_attention_heads"])
        return StackConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=content[f"{side}_layers"],
            attention=attention,
            cross_attention=attention if side == "decoder" else None,
            feed_forward=FeedForwardConfig(
                content[f"{side}_ffn_dim"], _ACTIVATIONS[content.get("activation_function", "gelu")]
            ),
            norm=NormConfig(placement="post", final=False),
            positions="sinusoidal_halves",
            max_positions=content.get("max_position_embeddings", 512),
            embedding_scale=math.sqrt(max(0, d_model)) if content.get("scale_embedding", False) else 1.0,
        )

    return EncoderDecoderConfig(
        encoder=stack("encoder", content["vocab_size"]),
        decoder=stack("decoder", content.get("decoder_vocab_size") or content["vocab_size"]),
        share_embeddings=embeddings.share,
        tie_output=embeddings.tie,
        output_bias=output_bias,
    )


def vocabulary_of(content: dict[str, Any], config: EncoderDecoderConfig) -> Vocabulary:
    return Vocabulary(
        source_size=config.encoder.vocab_size,
        target_size=config.decoder.vocab_size,
        pad_id=content["pad_token_id"],
        eos_ids=(content["eos_token_id"],),
        decoder_start_id=content["decoder_start_token_id"],
    )


def map_weights(tensors: dict[str, Tensor], config: EncoderDecoderConfig, bias: Tensor | None) -> dict[str, Tensor]:
    embeddings = _Embeddings(tensors)
    mapped = {
        "source_embedding.tokens.weight": embeddings.source,
        "target_embedding.tokens.weight": embeddings.target,
        "output.weight": embeddings.output,
    }
    if bias is not None:
        mapped["output.bias"] = bias
    around = ("embed_tokens.weight", "embed_positions.weight", "shared.weight", "lm_head.weight")
    return mapped | map_layers({name: tensor for name, tensor in tensors.items() if not name.endswith(around)})


def _original(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor], bias: Tensor | None) -> Any:
    """The model as Hugging Face runs it."""
    from transformers import MarianConfig, MarianMTModel
    from transformers.utils import logging as transformers_logging

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


class _MarianTokenizer(OriginalTokenizer):
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
