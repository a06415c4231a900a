"""Hugging Face's `EncoderDecoderModel`: two models that were trained apart and joined by cross-attention, such as
BERT2BERT, BERT2GPT2 and RoBERTa-shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from beamline.converters.checkpoints.tokenizers import FastTokenizer
from beamline.converters.families.gpt2 import decoder_stack, layer_problems, map_layer
from beamline.converters.loaders.bert_weights import BERT_KIN, bert_problems, bert_stack, map_bert, map_bert_head
from beamline.converters.loaders.hugging_face import Checkpoint
from beamline.converters.loaders.seq2seq import Seq2SeqConverter, Text
from beamline.converters.modules.transformer.config import EncoderDecoderConfig, StackConfig

_PROJECTION = "enc_to_dec_proj"
_TARGET_FOLDER = "decoder"  # of the target's tokenizer, where the target has a vocabulary of its own


class EncoderDecoderPairConverter(Seq2SeqConverter):
    family = "encoder-decoder"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "Hugging Face `EncoderDecoderModel` directories: BERT or RoBERTa, and BERT, RoBERTa or GPT-2"
    endings = ("EncoderDecoderModel",)

    @classmethod
    def unsupported(cls, config: Any) -> list[str]:
        encoder, decoder = config.encoder, config.decoder
        reasons = []
        if encoder.model_type in BERT_KIN:
            reasons += [f"encoder: {reason}" for reason in bert_problems(encoder)]
        else:
            reasons.append(f"its encoder is {encoder.model_type!r}; supported: {', '.join(BERT_KIN)}")
        if decoder.model_type in BERT_KIN:
            reasons += [f"decoder: {reason}" for reason in bert_problems(decoder)]
            if not decoder.is_decoder:
                reasons.append("decoder: is_decoder is off: it would see the words that it has yet to write")
        elif decoder.model_type == "gpt2":
            reasons += [f"decoder: {reason}" for reason in layer_problems(decoder)]
        else:
            reasons.append(f"its decoder is {decoder.model_type!r}; supported: {', '.join(BERT_KIN)}, gpt2")
        if not decoder.add_cross_attention:
            reasons.append("decoder: add_cross_attention is off: it would not see the source")
        start = getattr(config, "decoder_start_token_id", None)
        if BERT_KIN.get(decoder.model_type) and start is not None and start == decoder.pad_token_id:
            reasons.append("decoder_start_token_id is the decoder's pad_token_id, which has no position")
        return reasons

    @classmethod
    def architecture(cls, config: Any, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
        source, target, output = (tensors[name] for name in _embeddings(config))
        decoder = _decoder(config.decoder)
        return EncoderDecoderConfig(
            encoder=bert_stack(config.encoder),
            decoder=decoder,
            share_embeddings=source.shape == target.shape and torch.equal(source, target),
            tie_output=torch.equal(target, output),
            output_bias=decoder.output_transform is not None,
        )

    @classmethod
    def map_weights(cls, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = ("source_embedding.tokens.weight", "target_embedding.tokens.weight", "output.weight")
        mapped = {ours: tensors[theirs] for ours, theirs in zip(names, _embeddings(config), strict=True)}
        mapped |= map_bert(config.encoder, tensors, "encoder", "source_embedding", "encoder")
        if config.decoder.model_type == "gpt2":
            mapped["target_embedding.table"] = tensors["decoder.transformer.wpe.weight"]
            for kind in ("weight", "bias"):
                mapped[f"decoder_norm.{kind}"] = tensors[f"decoder.transformer.ln_f.{kind}"]
            for layer in range(config.decoder.n_layer):
                mapped |= map_layer(tensors, f"decoder.transformer.h.{layer}", f"decoder.{layer}")
        else:
            base = f"decoder.{BERT_KIN[config.decoder.model_type].prefix}"
            mapped |= map_bert(config.decoder, tensors, base, "target_embedding", "decoder")
            mapped |= map_bert_head(config.decoder, tensors, "decoder")
        if f"{_PROJECTION}.weight" in tensors:
            _join_projection(mapped, tensors[f"{_PROJECTION}.weight"], tensors[f"{_PROJECTION}.bias"])
        return mapped

    @classmethod
    def stored_under(cls, config: Any, name: str) -> str | None:
        """Of a pair that shares its weights, the encoder's are stored; transformers has forgotten how to share them."""
        kin = BERT_KIN.get(config.decoder.model_type)
        if kin is None or not getattr(config, "tie_encoder_decoder", False):
            return None
        base = f"decoder.{kin.prefix}."
        if name == f"decoder.{kin.output}.weight" and config.decoder.tie_word_embeddings:
            name = f"{base}embeddings.word_embeddings.weight"
        return f"encoder.{name.removeprefix(base)}" if name.startswith(base) else None

    def text(self, tokenizer: Any, config: Any, generation: Mapping[str, Any]) -> Text:
        folder = self.source / _TARGET_FOLDER
        if folder.is_dir():
            return Text(FastTokenizer(tokenizer), target_tokenizer=FastTokenizer(Checkpoint(folder).tokenizer()))
        encoder, decoder = config.encoder, config.decoder
        if (encoder.model_type, encoder.vocab_size) != (decoder.model_type, decoder.vocab_size):
            Checkpoint(self.source).refuse(
                [
                    f"its encoder ({encoder.model_type}, {encoder.vocab_size} words) and its decoder "
                    f"({decoder.model_type}, {decoder.vocab_size}) have two vocabularies: save the decoder's tokenizer "
                    f'in {folder} (save_pretrained("{_TARGET_FOLDER}"); the encoder\'s stays where config.json is)'
                ]
            )
        return Text(FastTokenizer(tokenizer))


def _embeddings(config: Any) -> tuple[str, str, str]:
    """Of source and target, and the output."""
    source, kind = "encoder.embeddings.word_embeddings.weight", config.decoder.model_type
    if kind == "gpt2":
        return source, "decoder.transformer.wte.weight", "decoder.lm_head.weight"
    kin = BERT_KIN[kind]
    return source, f"decoder.{kin.prefix}.embeddings.word_embeddings.weight", f"decoder.{kin.output}.weight"


def _decoder(config: Any) -> StackConfig:
    if config.model_type == "gpt2":
        return decoder_stack(config)
    return bert_stack(config, decoder=True)


def _join_projection(mapped: dict[str, Tensor], weight: Tensor, bias: Tensor) -> None:
    """The encoder's width is brought to the decoder's before cross-attention, whose own product follows at once: they
    are one."""
    for name in [name for name in mapped if name.endswith("cross_attention.key_value.weight")]:
        own, own_bias = mapped[name], name.removesuffix("weight") + "bias"
        mapped[own_bias] = mapped[own_bias] + own @ bias
        mapped[name] = own @ weight
