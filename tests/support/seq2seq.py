"""Small encoder-decoders of every family with random weights whose outputs vary and end by themselves, and the
tokenizers that belong to them, as Hugging Face saves them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ByT5Tokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    MT5Config,
    MT5ForConditionalGeneration,
    NllbTokenizer,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from beamline.converters.families import converter_for
from beamline.serving.contract.manifest import Manifest, read_manifest
from tests.support.fixture_cache import fixture_cache
from tests.support.marian import train_sentencepiece
from tests.support.text import english_lines

POSITIONS = 256
PIECES = 160
SPARE_ROWS = 3  # an embedding has more rows than there are words
LIVELY = 0.8
# By family or by name. With less, M2M100 says hardly anything; and of the seeds of those with RoBERTa, this is a robust
# one: their tokenizers are trained anew each time, and come out a little different.
_CALM: dict[str, dict[str, Any]] = {"m2m_100": {"across": 0.6}, "roberta": {"seed": 1}, "bert2roberta": {"seed": 1}}


@dataclass(frozen=True)
class Seq2SeqShape:
    """One kind of model: its type, its tokenizer, and how its configuration differs from the smallest of its family."""

    name: str
    family: str
    tokenizer: str
    options: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # one by which outputs vary and end
    across: float = LIVELY  # the spread of cross-attention's weights

    def calm(self) -> Seq2SeqShape:
        """One that fewer bits don't make another model of: the lively ones turn on the last digits of their source."""
        return replace(
            self, name=f"{self.name}-calm", **{"across": 0.3, **_CALM.get(self.family, {}), **_CALM.get(self.name, {})}
        )

    def original(self) -> Any:
        tokenizer = self.make_tokenizer()
        config, model, sizes = _FAMILIES[self.family]
        ids = _special_ids(tokenizer)
        torch.manual_seed(self.seed)
        words = max(tokenizer.get_vocab().values(), default=0) + 1
        languages = getattr(tokenizer, "lang_code_to_id", {}).values()  # M2M100 does not count them as words
        settings = {"vocab_size": max(words, *languages, 0) + SPARE_ROWS, **ids, **sizes, **self.options}
        return enlivened(model(config(**settings)).eval(), self.generation, self.across)

    def make_tokenizer(self) -> Any:
        return make_tokenizer(self.tokenizer)

    def save_tokenizers(self, folder: Path) -> None:
        self.make_tokenizer().save_pretrained(folder)

    def write(self, folder: Path, **saving: Any) -> None:
        self.original().save_pretrained(folder, **saving)
        self.save_tokenizers(folder)


_BART_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "forced_eos_token_id": None,
}
_T5_SIZES = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
    "n_positions": POSITIONS,
    "decoder_start_token_id": 0,
}
_FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "bart": (BartConfig, BartForConditionalGeneration, _BART_SIZES),
    "mbart": (MBartConfig, MBartForConditionalGeneration, _BART_SIZES),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration, _BART_SIZES),
    "m2m_100": (M2M100Config, M2M100ForConditionalGeneration, _BART_SIZES),
    "t5": (T5Config, T5ForConditionalGeneration, _T5_SIZES),
    "mt5": (MT5Config, MT5ForConditionalGeneration, _T5_SIZES),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration, _T5_SIZES),
}
_WIDE = ("lm_head.weight", "shared", "embed_tokens", "word_embeddings", "wte", "relative_attention_bias")
_UNEVEN = {"encoder_layers": 3, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}

BART = Seq2SeqShape("bart", "bart", "bart", generation={"forced_bos_token_id": 0, "num_beams": 4})
MBART25 = Seq2SeqShape("mbart-25", "mbart", "mbart", {"scale_embedding": True})
NLLB = Seq2SeqShape("nllb", "m2m_100", "nllb", {"scale_embedding": True})
T5 = Seq2SeqShape("t5", "t5", "t5", seed=23)
SHAPES = (
    BART,
    Seq2SeqShape("bart-uneven", "bart", "bart", {**_UNEVEN, "scale_embedding": True}, {"forced_eos_token_id": 2}),
    Seq2SeqShape(
        "bart-untied-relu", "bart", "bart", {"tie_word_embeddings": False, "activation_function": "relu"}, seed=6
    ),
    MBART25,
    Seq2SeqShape("mbart-50", "mbart", "mbart50", {"decoder_start_token_id": 2}),
    Seq2SeqShape("mbart-50-uneven", "mbart", "mbart50", {**_UNEVEN, "decoder_start_token_id": 2}, seed=6),
    Seq2SeqShape("pegasus", "pegasus", "t5", {"decoder_start_token_id": 0, "scale_embedding": True}),
    Seq2SeqShape("pegasus-uneven", "pegasus", "t5", {**_UNEVEN, "decoder_start_token_id": 0}, seed=7),
    Seq2SeqShape("m2m100", "m2m_100", "m2m100", {"scale_embedding": True}),
    Seq2SeqShape("m2m100-uneven", "m2m_100", "m2m100", {**_UNEVEN, "activation_function": "gelu"}),
    NLLB,
    Seq2SeqShape("nllb-legacy", "m2m_100", "nllb-legacy", {"scale_embedding": True}),
    T5,
    Seq2SeqShape("flan-t5", "t5", "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    Seq2SeqShape(
        "t5-uneven", "t5", "t5", {"num_layers": 3, "num_decoder_layers": 1, "num_heads": 2, "d_kv": 12}, seed=7
    ),
    Seq2SeqShape("mt5", "mt5", "t5", {"feed_forward_proj": "gated-gelu"}),
    Seq2SeqShape("byt5", "t5", "byt5", {"feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 1}),
    Seq2SeqShape("umt5", "umt5", "t5", {"feed_forward_proj": "gated-gelu"}),
    Seq2SeqShape("madlad", "t5", "madlad", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
)


def enlivened(model: Any, generation: dict[str, Any], spread_across: float) -> Any:
    _enliven(model, spread_across)
    _set_generation(model, generation)
    return model


@torch.no_grad()
def _enliven(model: Any, spread_across: float) -> None:
    """Random weights of the usual size repeat one word for ever; these were found by trying. A long vector for the end
    token makes texts end."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("embed_positions", "position_embeddings", "wpe")):
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
        elif parameter.dim() > 1:
            wide = any(part in name for part in _WIDE)
            across = any(part in name for part in ("encoder_attn", "EncDecAttention", "crossattention"))
            parameter.normal_(std=0.5 if wide else spread_across if across else 0.25)
            if name.endswith("Attention.q.weight"):
                parameter.mul_(model.config.d_kv**-0.5)  # T5's attention has no scale of its own
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(mean=1.0, std=0.1)
    output = model.get_output_embeddings().weight
    output[model.config.eos_token_id] *= 2.0
    if model.config.pad_token_id != model.config.eos_token_id:
        output[model.config.pad_token_id] *= 0.1
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.1)


def _set_generation(model: Any, settings: dict[str, Any]) -> None:
    generation = model.generation_config
    for name, value in {"max_length": POSITIONS, **settings}.items():
        setattr(generation, name, value)


def _special_ids(tokenizer: Any) -> dict[str, int]:
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}


# -- tokenizers ------------------------------------------------------------------------------------------------------


@cache
def sentencepiece_model() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        lines = english_lines()[:2000]
        path = train_sentencepiece(Path(folder) / "spm.model", lines, vocab_size=PIECES, model_type="unigram")
        return path.read_bytes()


@cache
def pieces() -> list[tuple[str, float]]:
    """Of ordinary words, with their scores."""
    model = SentencePieceProcessor()
    model.LoadFromSerializedProto(sentencepiece_model())
    return [(model.id_to_piece(i), model.get_score(i)) for i in range(3, model.get_piece_size())]


@cache
def make_tokenizer(kind: str) -> Any:
    return _TOKENIZERS[kind]()


def _t5() -> Any:
    return T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces()], extra_ids=5)


def _madlad() -> Any:
    languages = [(f"<2{code}>", 0.0) for code in ("de", "fr", "zh_Hant", "ace")]
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *languages, *pieces()], extra_ids=0)
    tokenizer.add_tokens([name for name, _ in languages], special_tokens=True)
    return tokenizer


def _mbart() -> Any:
    return MBartTokenizer(vocab=[("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces()])


def _mbart50() -> Any:
    return MBart50Tokenizer(vocab=[("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces()])


def _bpe(special: list[str], metaspace: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    before: Any = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = before
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    size = PIECES if metaspace else PIECES + 256
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(english_lines()[:2000], trainer)
    return tokenizer


def _nllb(legacy: bool = False) -> Any:
    model = json.loads(_bpe(["<s>", "<pad>", "</s>", "<unk>"], metaspace=True).to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return NllbTokenizer(vocab=model["vocab"], merges=merges, legacy_behaviour=legacy)


def _m2m100() -> Any:
    folder = Path(tempfile.mkdtemp())
    (folder / "spm.model").write_bytes(sentencepiece_model())
    # A few pieces are left out: they are unknown words then.
    words = ["<s>", "<pad>", "</s>", "<unk>", *(word for number, (word, _) in enumerate(pieces()) if number % 50 != 7)]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    return M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "spm.model"))


def _bart() -> Any:
    from tokenizers import decoders, processors

    tokenizer = _bpe(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], metaspace=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bart": _bart,
    "mbart": _mbart,
    "mbart50": _mbart50,
    "nllb": _nllb,
    "nllb-legacy": lambda: _nllb(legacy=True),
    "m2m100": _m2m100,
    "t5": _t5,
    "madlad": _madlad,
    "byt5": lambda: ByT5Tokenizer(extra_ids=5),
}


def write_seq2seq(folder: Path, shape: Seq2SeqShape, **saving: Any) -> Path:
    """A directory as it is published. `saving` goes to `save_pretrained` (shards, and other formats)."""
    shape.write(folder, **saving)
    return folder


@dataclass(frozen=True)
class ConvertedSeq2Seq:
    # The cache of fixtures asks for its `repr`: neither where it lies, nor what torch prints of it.
    original: Any = field(repr=False)
    source: Path = field(repr=False)
    folder: Path = field(repr=False)
    manifest: Manifest
    shape: Seq2SeqShape


def convert_seq2seq(shape: Seq2SeqShape, folder: Path) -> ConvertedSeq2Seq:
    """As version 1 of a model with the shape's name, in `folder / "repository"`."""
    fixture_cache().fill(folder, write_converted, shape=shape)
    version = folder / "repository" / shape.name / "1"
    return ConvertedSeq2Seq(shape.original(), folder / "source", version, read_manifest(version), shape)


def write_converted(folder: Path, shape: Seq2SeqShape) -> None:
    source = write_seq2seq(folder / "source", shape)
    converter_for(source).convert(shape.name, folder / "repository", grid="quick")  # the tests compare more themselves
