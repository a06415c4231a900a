"""OpenNMT-py 3 Transformers: a folder with the checkpoint (.pt, which may have its weights in a .safetensors beside
it), which holds its words, and the sentencepiece model that cut its text; or a file given by --config says what did.

Read from OpenNMT-py's own code: `models/model_saver.py` (layout), `model_builder.py`, `encoders` and `decoders`
(options and weights), `inputters/text_utils.py` (what stands around a text), `constants.py` (its special words).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.files import read_weights
from beamline.converters.checkpoints.pickles import options_of
from beamline.converters.checkpoints.word_lists import WordList
from beamline.converters.loaders.plain_transformer import Positions
from beamline.converters.loaders.toolkits import ToolkitConverter, ToolkitModel, ToolkitParts
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
    uneven_heads,
)

_PAD, _START, _EOS, _UNKNOWN = "<blank>", "<s>", "</s>", "<unk>"
_POSITIONS = {"SinusoidalInterleaved": "sinusoidal", "SinusoidalConcat": "sinusoidal_fairseq"}
_ACTIVATIONS = {"relu": ("relu", False), "gelu": ("gelu", False), "silu": ("silu", True), "gated-gelu": ("gelu", True)}
_LONGEST = 1024  # its tables are made for 5,000, of which no training makes use
# Options that change what is computed, and the values that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("text",),
    "model_task": ("seq2seq",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "position_encoding": (True,),
    "position_encoding_type": tuple(_POSITIONS),
    "pos_ffn_activation_fn": tuple(_ACTIVATIONS),
    "layer_norm": ("standard", "rms"),
    "max_relative_positions": (0,),
    "copy_attn": (False,),
    "parallel_residual": (False,),
    "num_experts": (0,),
    "sliding_window": (0,),
    "n_src_feats": (0,),
    "generator_function": ("softmax",),
    "lora_layers": ([],),
    "lora_embedding": (False,),
    "quant_layers": ([],),
    "lambda_coverage": (0.0,),
}
# Theirs -> fairseq's. A feed-forward has its norm inside.
_RENAMES = {
    "self_attn.linear_query": "self_attn.q_proj",
    "self_attn.linear_keys": "self_attn.k_proj",
    "self_attn.linear_values": "self_attn.v_proj",
    "self_attn.final_linear": "self_attn.out_proj",
    "context_attn.linear_query": "encoder_attn.q_proj",
    "context_attn.linear_keys": "encoder_attn.k_proj",
    "context_attn.linear_values": "encoder_attn.v_proj",
    "context_attn.final_linear": "encoder_attn.out_proj",
    "feed_forward.w_1": "fc1",
    "feed_forward.w_2": "fc2",
    "feed_forward.w_3": "fc3",
    "feed_forward.layer_norm": "final_layer_norm",
    "layer_norm": "self_attn_layer_norm",
    "layer_norm_1": "self_attn_layer_norm",
    "layer_norm_2": "encoder_attn_layer_norm",
}
_LAYER = re.compile(r"(encoder|decoder)\.transformer(?:_layers)?\.(\d+)\.(.+)\.(weight|bias)")
_AROUND = {
    "encoder.embeddings.make_embedding.emb_luts.0.weight": "encoder.embed_tokens.weight",
    "decoder.embeddings.make_embedding.emb_luts.0.weight": "decoder.embed_tokens.weight",
    "generator.weight": "decoder.output_projection.weight",
    "generator.bias": "decoder.output_projection.bias",
}


class OpenNmtConverter(ToolkitConverter):
    family = "opennmt_py"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "OpenNMT-py 3 Transformers: the folder with the checkpoint and a sentencepiece model"
    toolkit = "OpenNMT-py"
    unreadable = (
        "A folder without config.json is taken for one of fairseq (with dict.*.txt) or of OpenNMT-py, whose .pt must "
        "be as version 3 writes it: opt, vocab and model; one of version 2 is made so by its tools/convertv2_v3.py"
    )

    def read(self, content: dict[str, Any], weights: Path, parts: ToolkitParts) -> ToolkitModel:
        if not {"opt", "vocab"} <= content.keys():
            self.refuse([f"{weights.name} has {', '.join(map(str, content))}, not opt and vocab. {self.unreadable}"])
        options = options_of(content["opt"])
        vocabularies = content["vocab"]
        self.refuse([*_unsupported(options), *_wrong_words(vocabularies)])
        source, target = (list(vocabularies[side]) for side in ("src", "tgt"))
        tensors = _renamed(_stored(content, weights))
        self.refuse(_misfits(tensors, source, target))
        architecture = _architecture(options, tensors, parts.max_positions)
        start = vocabularies.get("decoder_start_token") or _START
        if start not in target:
            self.refuse([f"decoder_start_token is {start!r}, which is no word of the target"])
        same = source == target
        source_list = _word_list(source)
        return ToolkitModel(
            architecture=architecture,
            tensors=tensors,
            positions=dict.fromkeys(("encoder", "decoder"), _positions(architecture.decoder)),
            source=source_list,
            target=source_list if same else _word_list(target),
            pad_id=target.index(_PAD),
            eos_id=target.index(_EOS),
            start_id=target.index(start),
            source_language=parts.source_language,
            target_language=parts.target_language,
        )


def _unsupported(options: dict[str, Any]) -> list[str]:
    reasons = []
    for name, allowed in _SUPPORTED.items():
        value = options.get(name)
        if value is not None and value not in allowed:
            shown = ", ".join(map(repr, allowed)) if allowed != ([],) else "none"
            reasons.append(f"{name} is {value!r}; supported: {shown}")
    width, decoder = (options.get(f"{side}_hid_size") or options.get("hidden_size") for side in ("enc", "dec"))
    words = [options.get(name) or width for name in ("src_word_vec_size", "tgt_word_vec_size")]
    if {decoder, *words} != {width}:
        reasons.append(
            f"enc_hid_size {width}, dec_hid_size {decoder}, src_word_vec_size {words[0]} and tgt_word_vec_size "
            f"{words[1]} must be equal"
        )
    elif width:
        reasons += uneven_heads(width, options.get("heads") or 8)
    return reasons


def _wrong_words(vocabularies: Any) -> list[str]:
    reasons = []
    for side in ("src", "tgt"):
        words = vocabularies.get(side) if isinstance(vocabularies, dict) else None
        if not isinstance(words, list):
            reasons.append(f"vocab has no list of words {side!r}: a checkpoint of version 3 has")
            continue
        special = (_PAD, _UNKNOWN) if side == "src" else (_PAD, _UNKNOWN, _EOS)
        reasons += [f"vocab {side!r} has no {word}" for word in special if word not in words]
    if not reasons and vocabularies["src"].index(_PAD) != vocabularies["tgt"].index(_PAD):
        reasons.append(f"{_PAD} has one place among the source's words and another among the target's")
    if not reasons and vocabularies.get("src_feats"):
        reasons.append("vocab has src_feats: words with features are not supported")
    return reasons


def _stored(content: dict[str, Any], weights: Path) -> dict[str, Tensor]:
    """Of the pickle, or of the file beside it where it was saved so."""
    if "model" not in content:
        return read_weights(weights.parent, (weights.with_suffix(".safetensors").name,))
    generator = {
        f"generator.{name.removeprefix('0.')}": each for name, each in (content.get("generator") or {}).items()
    }
    found = {**content["model"], **generator}
    return {name: each.float() if each.is_floating_point() else each for name, each in found.items()}


def _renamed(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """By fairseq's names; what has none keeps its own, and is reported."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        name = re.sub(r"\.a_2$", ".weight", re.sub(r"\.b_2$", ".bias", name))  # of a norm, in version 1
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[3] in _RENAMES:
            tensors[f"{layer[1]}.layers.{layer[2]}.{_RENAMES[layer[3]]}.{layer[4]}"] = tensor
        elif not name.endswith("embeddings.make_embedding.pe.pe"):
            tensors[_AROUND.get(name, name)] = tensor
    if "encoder.embed_tokens.weight" in tensors:  # shared ones may be stored once
        tensors.setdefault("decoder.embed_tokens.weight", tensors["encoder.embed_tokens.weight"])
    if "decoder.embed_tokens.weight" in tensors:
        tensors.setdefault("decoder.output_projection.weight", tensors["decoder.embed_tokens.weight"])
    return tensors


def _misfits(tensors: dict[str, Tensor], source: list[str], target: list[str]) -> list[str]:
    needed = {"encoder.embed_tokens.weight": source, "decoder.embed_tokens.weight": target}
    missing = [f"{name} is missing" for name in (*needed, "encoder.layers.0.fc1.weight") if name not in tensors]
    return missing or [
        f"{name} has {len(tensors[name])} rows, but the checkpoint {len(words)} words"
        for name, words in needed.items()
        if len(tensors[name]) != len(words)
    ]


def _architecture(options: dict[str, Any], tensors: dict[str, Tensor], longest: int | None) -> EncoderDecoderConfig:
    source, target = tensors["encoder.embed_tokens.weight"], tensors["decoder.embed_tokens.weight"]
    width, heads = source.shape[1], options.get("heads") or 8
    activation, gated = _ACTIVATIONS[options.get("pos_ffn_activation_fn") or "relu"]

    def attention(at: str) -> AttentionConfig:
        biased = f"{at}.q_proj.bias" in tensors
        return AttentionConfig(
            heads,
            width // heads,
            options.get("num_kv") or heads,
            qkv_bias=biased,
            output_bias=f"{at}.out_proj.bias" in tensors,
        )

    def stack(side: str, words: Tensor, layers: str) -> StackConfig:
        inner = tensors["encoder.layers.0.fc1.weight"]
        return StackConfig(
            vocab_size=len(words),
            d_model=width,
            layers=int(options.get(layers) or options.get("layers") or 0),
            attention=attention(f"{side}.layers.0.self_attn"),
            cross_attention=attention(f"{side}.layers.0.encoder_attn") if side == "decoder" else None,
            feed_forward=FeedForwardConfig(
                len(inner), activation, gated=gated, bias=f"{side}.layers.0.fc1.bias" in tensors
            ),
            norm=NormConfig(
                kind="rms" if options.get("layer_norm") == "rms" else "layer", eps=options.get("norm_eps") or 1e-6
            ),
            positions=_POSITIONS[options.get("position_encoding_type") or "SinusoidalInterleaved"],
            max_positions=longest or _LONGEST,
            padding_id=-1,  # its tables begin at 0, and every token is counted
            embedding_scale=math.sqrt(width),
        )

    return EncoderDecoderConfig(
        encoder=stack("encoder", source, "enc_layers"),
        decoder=stack("decoder", target, "dec_layers"),
        share_embeddings=source.shape == target.shape and torch.equal(source, target),
        tie_output=torch.equal(target, tensors["decoder.output_projection.weight"]),
        output_bias="decoder.output_projection.bias" in tensors,
    )


def _positions(config: StackConfig) -> Positions:
    """As OpenNMT-py computes them."""
    places = torch.arange(config.max_positions).unsqueeze(1).float()
    if config.positions == "sinusoidal":
        table = torch.zeros(config.max_positions, config.d_model)
        rates = torch.exp(torch.arange(0, config.d_model, 2).float() * -(math.log(10000.0) / config.d_model))
        table[:, 0::2], table[:, 1::2] = torch.sin(places * rates), torch.cos(places * rates)
    else:
        half = config.d_model // 2
        angles = places * torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return lambda tokens: table[: tokens.shape[1]]


def _word_list(words: list[str]) -> WordList:
    ids = {word: index for index, word in enumerate(words)}
    hidden = tuple(ids[word] for word in (_PAD, _START, _EOS, _UNKNOWN) if word in ids)
    return WordList(ids, ids[_UNKNOWN], hidden)
