"""Checkpoints as fairseq writes them, old and new. fairseq can't be installed here: the weights are those of the models
of Hugging Face that came from it, whose names are fairseq's but for a prefix."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
)

from tests.support.seq2seq import POSITIONS, Seq2SeqShape, enlivened, pieces, sentencepiece_model

LANGUAGES = ("de", "en", "fr")
_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_OPTIONS = {
    "encoder_embed_dim": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 48,
    "decoder_ffn_embed_dim": 64,
    "max_source_positions": POSITIONS,
    "max_target_positions": POSITIONS,
    "dropout": 0.1,
}


def dictionary(skipped: int, padded: bool = True) -> list[str]:
    """Words of a file as fairseq-preprocess writes it: all pieces but some, filled up to a multiple of eight."""
    words = [word for number, (word, _) in enumerate(pieces()) if number % 50 != skipped]
    while padded and (len(words) + 4) % 8:
        words.append(f"madeupword{len(words):04d}")
    return words


@dataclass(frozen=True)
class FairseqShape(Seq2SeqShape):
    """`family` is Hugging Face's twin."""

    source_words: int = 7  # which of the pieces the source's dictionary leaves out
    target_words: int = 7
    layout: str = "cfg"  # or "args", "nested"
    said: dict[str, Any] = field(default_factory=dict)  # by the checkpoint, in fairseq's words

    def original(self) -> Any:
        torch.manual_seed(self.seed)
        source, target = (4 + len(dictionary(each)) for each in (self.source_words, self.target_words))
        if self.family == "fsmt":
            vocabularies = {"langs": ["en", "de"], "src_vocab_size": source, "tgt_vocab_size": target}
            model: Any = FSMTForConditionalGeneration(FSMTConfig(**{**_SIZES, **vocabularies, **self.options}))
        elif self.family == "m2m_100":
            model = M2M100ForConditionalGeneration(
                M2M100Config(**{**_SIZES, "vocab_size": source + len(LANGUAGES), **self.options})
            )
        else:
            model = BartForConditionalGeneration(BartConfig(**{**_SIZES, "vocab_size": source, **self.options}))
        model = enlivened(model.eval(), self.generation, self.across)
        if self.family == "fsmt":
            for side in (model.model.encoder, model.model.decoder):  # enlivened with the rest
                side.embed_positions.make_weight(POSITIONS + 2, model.config.d_model, 1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.zero_()  # fairseq has none
        return model

    def write(self, folder: Path, **saving: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spm.model").write_bytes(sentencepiece_model())
        for language, skipped in (("en", self.source_words), ("de", self.target_words)):
            lines = [f"{word} {1000 - number}" for number, word in enumerate(dictionary(skipped))]
            (folder / f"dict.{language}.txt").write_text("\n".join(lines) + "\n")
        torch.save(self.checkpoint(), folder / "checkpoint_best.pt")

    def checkpoint(self) -> dict[str, Any]:
        options = {**_OPTIONS, **self.said}
        task = {"task": "translation", "source_lang": "en", "target_lang": "de", **options}
        history = [{"criterion_name": "LabelSmoothedCrossEntropyCriterion", "num_updates": 7}]
        extra = {"metrics": [(0, "default", "loss", {"val": np.float64(1.5)})], "val_loss": 1.5}
        content: dict[str, Any] = {"optimizer_history": history, "extra_state": extra, "task_state": {}}
        if self.layout == "args":
            content |= {"args": Namespace(arch="transformer_wmt_en_de", **task)}
            return content | {"model": _older(self.weights())}
        model: Any = Namespace(_name="transformer", arch="transformer", **task)
        if self.layout == "nested":
            apart: dict[str, Any] = {"encoder": {}, "decoder": {}, "_name": "transformer"}
            for name, value in options.items():
                side, _, rest = name.partition("_")
                (apart[side] if side in ("encoder", "decoder") else apart)[rest if side in apart else name] = value
            model = apart
        task_content = {**task, "_name": task["task"]}
        return content | {"args": None, "cfg": {"task": task_content, "model": model}, "model": self.weights()}

    def weights(self) -> dict[str, Tensor]:
        found = {name.removeprefix("model."): each for name, each in self.original().state_dict().items()}
        weights = {
            name: tensor
            for name, tensor in found.items()
            if not name.startswith(("shared", "lm_head", "final_logits_bias"))
            and not (self.family != "bart" and "embed_positions" in name)
        }
        for side in ("encoder", "decoder"):
            weights[f"{side}.version"] = torch.tensor([3.0])
            if self.family != "bart":
                weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        if self.family == "m2m_100":
            weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
        return weights


def _older(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As versions before 0.9 named them."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            found[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif "_layer_norm." in name:
            side, _, _ = name.partition(".")
            order = ["self_attn", "final"] if side == "encoder" else ["self_attn", "encoder_attn", "final"]
            number = next(place for place, each in enumerate(order) if f"{each}_layer_norm" in name)
            found[name.replace(f"{order[number]}_layer_norm", f"layer_norms.{number}")] = tensor
        elif name == "decoder.output_projection.weight":
            found["decoder.embed_out"] = tensor
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor
    return found


WMT19 = FairseqShape(
    "fairseq-wmt19",
    "fsmt",
    "",
    {"scale_embedding": True, "activation_function": "relu"},
    target_words=11,
    layout="args",
    seed=1,
)
MULTILINGUAL = FairseqShape(
    "fairseq-multilingual",
    "m2m_100",
    "",
    {"scale_embedding": True, "activation_function": "relu"},
    seed=1,
    said={
        "task": "translation_multi_simple_epoch",
        "langs": ",".join(LANGUAGES),
        "encoder_langtok": "src",
        "decoder_langtok": True,
        "lang_tok_style": "multilingual",
        "share_all_embeddings": True,
        "encoder_normalize_before": True,
        "decoder_normalize_before": True,
    },
)
LEARNED = FairseqShape(
    "fairseq-learned",
    "bart",
    "",
    {"activation_function": "gelu", "normalize_embedding": True},
    layout="nested",
    seed=5,
    said={
        "activation_fn": "gelu",
        "encoder_learned_pos": True,
        "decoder_learned_pos": True,
        "layernorm_embedding": True,
        "no_scale_embedding": True,
        "share_all_embeddings": True,
    },
)
FAIRSEQ = (WMT19, MULTILINGUAL, LEARNED)
