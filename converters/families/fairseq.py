"""fairseq Transformers: a folder with the checkpoint (.pt), its dictionaries (dict.en.txt, dict.de.txt), and the
sentencepiece model that cut its text; or a file given by --config says what else did (`ToolkitParts`).

Read from fairseq's own code: `trainer.py` (layout), `models/transformer` (options, and how older weights are renamed),
`data/dictionary.py`, `data/multilingual` (tokens of languages).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from beamline.converters.checkpoints.pickles import options_of
from beamline.converters.checkpoints.word_lists import WordList
from beamline.converters.loaders.plain_transformer import Positions
from beamline.converters.loaders.toolkits import ToolkitConverter, ToolkitModel, ToolkitParts
from beamline.converters.loaders.translation_tokens import listed
from beamline.converters.modules.transformer.config import (
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    NormConfig,
    StackConfig,
    uneven_heads,
)
from beamline.serving.contract.manifest import Languages
from beamline.serving.errors import ConversionError

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
_TASKS = ("translation", "translation_multi_simple_epoch")
# What `base_architecture` gives to a checkpoint that says nothing.
_SIZES = {"embed_dim": 512, "ffn_embed_dim": 2048, "layers": 6, "attention_heads": 8}
# Options that change what is computed, and the values at which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "adaptive_input": (False,),
    "adaptive_softmax_cutoff": (),
    "no_cross_attention": (False,),
    "cross_self_attention": (False,),
    "char_inputs": (False,),
    "merge_src_tgt_embed": (False,),
    "base_layers": (0,),
    "encoder_layers_to_keep": (),
    "decoder_layers_to_keep": (),
    "lang_tok_replacing_bos_eos": (False,),
}
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_PAD, _EOS, _UNKNOWN = 1, 2, 3
_STYLES = {"multilingual": "__{}__", "mbart": "[{}]"}
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


class FairseqConverter(ToolkitConverter):
    family = "fairseq"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "fairseq Transformers: the folder with the checkpoint, its dictionaries and a sentencepiece model"
    toolkit = "fairseq"
    unreadable = "It must be a checkpoint as fairseq-train writes it: a pickle with args or cfg, and model"

    def read(self, content: dict[str, Any], weights: Path, parts: ToolkitParts) -> ToolkitModel:
        options = self._options(content)
        self.refuse(_unsupported(options))
        tensors = _renamed(content["model"])
        source_language = parts.source_language or options.get("source_lang")
        target_language = parts.target_language or options.get("target_lang")
        tokens = _language_tokens(options, self.source)
        source = self._words(parts.source_dictionary, source_language, "source", tokens)
        target = self._words(parts.target_dictionary, target_language, "target", tokens)
        self.refuse(_misfits(tensors, source, target))
        architecture = _architecture(options, tensors, parts.max_positions)
        languages = _languages(options, tokens, source)
        return ToolkitModel(
            architecture=architecture,
            tensors=_without_buffers(tensors),
            positions={side: _positions(getattr(architecture, side), tensors, side) for side in ("encoder", "decoder")},
            source=source,
            target=target,
            pad_id=_PAD,
            eos_id=_EOS,
            start_id=_EOS,
            source_language=source_language,
            target_language=target_language,
            languages=languages,
            forbidden=(_PAD,),
        )

    def _options(self, content: dict[str, Any]) -> dict[str, Any]:
        """Of the task and of the model, whose names don't meet."""
        if "model" not in content or not (content.get("args") or content.get("cfg")):
            self.refuse(
                [f"it is no fairseq checkpoint: it has {', '.join(map(str, content))}, not args or cfg, and model"]
            )
        if content.get("args") is not None:
            return options_of(content["args"])
        cfg = options_of(content["cfg"])
        task = options_of(cfg.get("task"))
        return task | options_of(cfg.get("model")) | {"task": task.get("_name", "translation")}

    def _words(self, name: str | None, language: str | None, side: str, tokens: dict[str, str]) -> WordList:
        """The special words, those of the dictionary's file, and what the task adds to them."""
        file = self.source / (name or f"dict.{language}.txt")
        if name is None and not file.is_file():  # one for all languages: dict.txt, or copies of one file
            files = sorted(self.source.glob("dict.*txt" if language is None else "dict.txt"))
            file = files[0] if files and len({path.read_bytes() for path in files}) == 1 else file
        if not file.is_file():
            raise ConversionError(
                f"{file} is missing: the {side}'s dictionary, as fairseq-preprocess writes it; under another name, a "
                f'file given by --config says which: {{"family": "fairseq", "{side}_dictionary": "..."}}'
            )
        ids = {word: index for index, word in enumerate(_SPECIAL)}
        size = len(ids)
        for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
            found = re.fullmatch(r"(.*) -?\d+( #fairseq:overwrite)?", line.rstrip(), re.DOTALL)
            if found is None or (found[1] in ids and not found[2]):
                what = "no word with its count" if found is None else f"the word {found[1]!r} once more"
                self.refuse([f"{file.name}, line {number}: {what}: {line!r}"])
                continue
            ids[found[1]] = size
            size += 1
        for token in tokens.values():
            if token not in ids:
                ids[token], size = size, size + 1
        hidden = (0, _PAD, _EOS, _UNKNOWN, *(ids[token] for token in tokens.values()))
        return WordList(ids, _UNKNOWN, hidden, (_EOS,), splits_at_spaces=True)


def _unsupported(options: dict[str, Any]) -> list[str]:
    reasons = [
        f"{name} is {options[name]!r}, which is not supported"
        for name, harmless in _NEUTRAL.items()
        if options.get(name) is not None and options[name] not in harmless
    ]
    if (task := options.get("task", "translation")) not in _TASKS:
        reasons.append(f"its task is {task!r}; supported: {', '.join(_TASKS)}")
    if (activation := options.get("activation_fn") or "relu") not in _ACTIVATIONS:
        reasons.append(f"activation_fn is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    width = _size(options, "encoder", "embed_dim")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if (options.get(name) or width) != width:
            reasons.append(f"{name} is {options[name]}, but encoder_embed_dim is {width}; they must be equal")
    for side in ("encoder", "decoder"):
        reasons += uneven_heads(width, _size(options, side, "attention_heads"))
    if options.get("encoder_langtok") == "tgt" and options.get("decoder_langtok"):
        reasons.append("encoder_langtok is 'tgt' and decoder_langtok is set: the target's language would stand twice")
    if options.get("decoder_langtok") and options.get("encoder_langtok") is None:
        reasons.append("decoder_langtok is set without encoder_langtok 'src', which is not supported")
    return list(dict.fromkeys(reasons))


def _size(options: dict[str, Any], side: str, name: str) -> int:
    """A decoder has the encoder's where it has none of its own."""
    found = options.get(f"{side}_{name}")
    if found is None and side == "decoder":
        return _size(options, "encoder", name)
    return int(_SIZES[name] if found is None else found)


def _renamed(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float32, with the names of today, as fairseq itself renames what older versions wrote."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        if old := re.fullmatch(r"(encoder|decoder)(\.layers\.\d+\.)layer_norms\.(\d)\.(\w+)", name):
            tensors[f"{old[1]}{old[2]}{_OLD_NORMS[old[1]][int(old[3])]}.{old[4]}"] = tensor
        elif joined := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                tensors[f"{joined[1]}{part}_proj.{joined[2]}"] = piece
        elif name == "decoder.embed_out":
            tensors["decoder.output_projection.weight"] = tensor
        else:
            tensors[name] = tensor
    if "decoder.embed_tokens.weight" in tensors:
        tensors.setdefault("decoder.output_projection.weight", tensors["decoder.embed_tokens.weight"])
    return tensors


def _without_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = ("version", "_float_tensor", "embed_positions.weights")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}


def _misfits(tensors: dict[str, Tensor], source: WordList, target: WordList) -> list[str]:
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    missing = [f"{name} is missing" for name in names if name not in tensors]
    return missing or [
        f"{name} has {len(tensors[name])} rows, but its dictionary {1 + max(words.ids.values())} words"
        for name, words in zip(names, (source, target), strict=True)
        if len(tensors[name]) != 1 + max(words.ids.values())
    ]


def _architecture(options: dict[str, Any], tensors: dict[str, Tensor], longest: int | None) -> EncoderDecoderConfig:
    width = _size(options, "encoder", "embed_dim")
    source, target, output = (
        tensors[name]
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    )

    def stack(side: str, words: Tensor, limit: str, final: bool) -> StackConfig:
        attention = AttentionConfig.even(width, _size(options, side, "attention_heads"))
        positions = "learned_fairseq" if options.get(f"{side}_learned_pos") else "sinusoidal_fairseq"
        allowed = int(options.get(limit) or options.get("max_positions") or 1024)
        return StackConfig(
            vocab_size=len(words),
            d_model=width,
            layers=_size(options, side, "layers"),
            attention=attention,
            cross_attention=attention if side == "decoder" else None,
            feed_forward=FeedForwardConfig(
                _size(options, side, "ffn_embed_dim"), _ACTIVATIONS[options.get("activation_fn") or "relu"]
            ),
            norm=NormConfig(placement="pre" if options.get(f"{side}_normalize_before") else "post", final=final),
            positions="none" if options.get("no_token_positional_embeddings") else positions,
            max_positions=min(allowed, longest or allowed),
            padding_id=_PAD,
            embedding_scale=1.0 if options.get("no_scale_embedding") else math.sqrt(width),
            embedding_norm=bool(options.get("layernorm_embedding")),
        )

    def final(side: str, since: int) -> bool:
        """Earlier versions had no norm behind the last layer."""
        version = tensors.get(f"{side}.version")
        return bool(options.get(f"{side}_normalize_before")) and version is not None and float(version[0]) >= since

    return EncoderDecoderConfig(
        encoder=stack("encoder", source, "max_source_positions", final("encoder", 2)),
        decoder=stack(
            "decoder",
            target,
            "max_target_positions",
            final("decoder", 3) and not options.get("no_decoder_final_norm"),
        ),
        share_embeddings=source.shape == target.shape and torch.equal(source, target),
        tie_output=torch.equal(target, output),
    )


def _positions(config: StackConfig, tensors: dict[str, Tensor], side: str) -> Positions:
    """As fairseq counts and computes them: padding tokens are not counted, and have a row of zeros."""
    if config.positions == "none":
        return lambda tokens: torch.zeros(())
    table = tensors.get(f"{side}.embed_positions.weight")
    if config.positions == "sinusoidal_fairseq" or table is None:
        half = config.d_model // 2
        rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angles = torch.arange(config.max_positions + _PAD + 1).float().unsqueeze(1) * rates.unsqueeze(0)
        table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
        table[_PAD] = 0
    rows = table

    def of(tokens: Tensor) -> Tensor:
        counted = tokens.ne(_PAD).int()
        return rows[(counted.cumsum(1) * counted).long() + _PAD]

    return of


def _language_tokens(options: dict[str, Any], folder: Path) -> dict[str, str]:
    """By language, in the order in which the multilingual task adds them to a dictionary."""
    if options.get("task") != "translation_multi_simple_epoch":
        return {}
    langs, pairs = options.get("langs"), options.get("lang_pairs") or ()
    if isinstance(langs, str):
        langs = langs.split(",")
    if not langs and options.get("lang_dict"):
        file = folder / Path(str(options["lang_dict"])).name
        if not file.is_file():
            raise ConversionError(f"{file} is missing: the list of languages that the checkpoint names")
        langs = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not langs:
        pairs = pairs.split(",") if isinstance(pairs, str) else pairs
        langs = sorted({language for pair in pairs for language in pair.split("-")})
    style = _STYLES[options.get("lang_tok_style") or "multilingual"]
    return {language: style.format(language) for language in langs}


def _languages(options: dict[str, Any], tokens: dict[str, str], words: WordList) -> Languages | None:
    place = options.get("encoder_langtok")
    if not tokens or place is None:
        return None
    known = listed({language: words.ids[token] for language, token in tokens.items()})
    target_place: Literal["source", "forced"] = "source" if place == "tgt" else "forced"
    if place == "src" and not options.get("decoder_langtok"):
        return Languages(source=known)
    return Languages(source=() if place == "tgt" else known, target=known, target_place=target_place)
