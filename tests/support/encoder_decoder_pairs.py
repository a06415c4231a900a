"""Small `EncoderDecoderModel`s of Hugging Face: encoder and decoder of every kind that is supported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import decoders as text_decoders
from transformers import (
    BertConfig,
    BertTokenizerFast,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.support.seq2seq import PIECES, POSITIONS, SPARE_ROWS, Seq2SeqShape, enlivened, make_tokenizer
from tests.support.text import english_lines

_CONFIGS: dict[str, Any] = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "xlm-roberta": XLMRobertaConfig,
    "gpt2": GPT2Config,
}
_BERT_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}


@dataclass(frozen=True)
class PairShape(Seq2SeqShape):
    """`family` is the encoder's, `tokenizer` the name of both tokenizers where there is no other for the decoder."""

    decoder: str = "bert"
    decoder_tokenizer: str | None = None
    decoder_options: dict[str, Any] = field(default_factory=dict)
    shared: bool = False  # encoder and decoder have the same weights, cross-attention and output apart

    def original(self) -> Any:
        source, target = self.make_tokenizer(), self.target_tokenizer()
        torch.manual_seed(self.seed)
        encoder = _config(self.family, source, self.options)
        decoder = _config(self.decoder, target, self.decoder_options, is_decoder=True, add_cross_attention=True)
        ids = {
            "decoder_start_token_id": _first(target.cls_token_id, target.bos_token_id),
            "eos_token_id": _first(target.sep_token_id, target.eos_token_id),
            "pad_token_id": _first(target.pad_token_id, 0),
        }
        config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **ids)
        model = enlivened(EncoderDecoderModel(config).eval(), {**ids, **self.generation}, self.across)
        _weaken_source(model)
        if self.shared:
            model.config.tie_encoder_decoder = True
            own = model.encoder.state_dict()
            below = getattr(model.decoder, self.decoder)
            below.load_state_dict({name: own[name] for name in below.state_dict() if name in own}, strict=False)
        return model

    def target_tokenizer(self) -> Any:
        return _pair_tokenizer(self.decoder_tokenizer or self.tokenizer)

    def make_tokenizer(self) -> Any:
        return _pair_tokenizer(self.tokenizer)

    def save_tokenizers(self, folder: Path) -> None:
        super().save_tokenizers(folder)
        if self.decoder_tokenizer is not None:
            self.target_tokenizer().save_pretrained(folder / "decoder")


@torch.no_grad()
def _weaken_source(model: Any) -> None:
    """What is right for the other families lets these repeat what the source makes them say first."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embeddings" not in name and "wte" not in name and "wpe" not in name:
            parameter.mul_(0.15 if "crossattention" in name else 2.0)
    output = model.get_output_embeddings()
    if output.bias is not None:
        output.bias[model.config.eos_token_id] += 4.0


def _first(*ids: int | None) -> int:
    return next(each for each in ids if each is not None)


def _config(kind: str, tokenizer: Any, options: dict[str, Any], **role: bool) -> Any:
    sizes = _GPT2_SIZES if kind == "gpt2" else dict(_BERT_SIZES)
    pad = _first(tokenizer.pad_token_id, 0)
    if "roberta" in kind:
        sizes["max_position_embeddings"] = POSITIONS + pad + 1  # as they count them
    words = max(tokenizer.get_vocab().values()) + 1 + SPARE_ROWS
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return _CONFIGS[kind](vocab_size=words, pad_token_id=pad, **{**sizes, **ends, **options, **role})


@cache
def _pair_tokenizer(kind: str) -> Any:
    return {"bert": _bert, "gpt2": _gpt2}[kind]() if kind in ("bert", "gpt2") else make_tokenizer(kind)


def _bert() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=PIECES, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(english_lines()[:2000], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = text_decoders.WordPiece()
    return BertTokenizerFast(tokenizer_object=tokenizer)


def _gpt2() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES + 256,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(english_lines()[:2000], trainer)
    tokenizer.decoder = text_decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


_WIDER = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
BERT2BERT = PairShape("bert2bert", "bert", "bert", seed=1)
BERT2GPT2 = PairShape("bert2gpt2", "bert", "bert", decoder="gpt2", decoder_tokenizer="gpt2", seed=10)
ROBERTA_SHARED = PairShape("roberta-shared", "roberta", "bart", decoder="roberta", shared=True, seed=7)
PAIRS = (
    BERT2BERT,
    PairShape("bert2bert-uneven", "bert", "bert", _WIDER, decoder_options={"hidden_act": "relu"}, seed=11),
    BERT2GPT2,
    PairShape(
        "xlm-roberta2gpt2-uneven", "xlm-roberta", "bart", _WIDER, decoder="gpt2", decoder_tokenizer="gpt2", seed=7
    ),
    PairShape("bert2roberta", "bert", "bert", decoder="roberta", decoder_tokenizer="bart", seed=6),
    ROBERTA_SHARED,
)
