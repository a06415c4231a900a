"""A complete tiny Marian model in Hugging Face's format, made offline."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from tests.support.text import english_lines


def train_sentencepiece(path: Path, lines: list[str], **options: Any) -> Path:
    """A small model, by default unigram; with a soft limit, so that any text will do."""
    model = BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 400,
        "hard_vocab_limit": False,
        "num_threads": 2,
        "minloglevel": 2,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]), model_writer=model, **settings
    )
    path.write_bytes(model.getvalue())
    return path


def write_marian_directory(
    path: Path,
    *,
    vocab_size: int = 400,
    language_codes: tuple[str, ...] = (),
    separate_vocabs: bool = False,
    config: dict[str, Any] | None = None,
    max_length: int = 64,
    num_beams: int = 4,
    scale: float = 1.0,
    seed: int = 0,
) -> Path:
    """`vocab_size` is that of each sentencepiece model; `scale` multiplies the random weight matrices.

    Source and target learn from different lines (the target's are reversed word by word and have
    German letters), so that each has pieces that the other lacks. A few pieces of both are left
    out of vocab.json: published models lack some, too.
    """
    path.mkdir(parents=True, exist_ok=True)
    lines = english_lines()
    source_lines, target_lines = lines[:2000], [_foreign(line) for line in lines[2000:4000]]
    for name, text in (("source.spm", source_lines), ("target.spm", target_lines)):
        train_sentencepiece(path / name, text, vocab_size=vocab_size, model_type="unigram")
    source, target = _pieces(path / "source.spm"), _pieces(path / "target.spm")
    if separate_vocabs:
        vocabulary = _vocabulary(source, language_codes)
        target_vocabulary = _vocabulary(target, ())
        # Both sides end with the same pad id, which is the model's; so the shorter one is filled up.
        _level(vocabulary, target_vocabulary)
        _write(path / "target_vocab.json", target_vocabulary)
    else:
        vocabulary = _vocabulary(source + target, language_codes)
    _write(path / "vocab.json", vocabulary)
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "source_lang": "en",
            "target_lang": "de",
            "model_max_length": 512,
            "separate_vocabs": separate_vocabs,
        },
    )
    pad = vocabulary["<pad>"]
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 128,
        "activation_function": "swish",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": not separate_vocabs,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "decoder_start_token_id": pad,
        **({"decoder_vocab_size": len(vocabulary)} if separate_vocabs else {}),
        **(config or {}),
    }
    marian_config = MarianConfig(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MarianMTModel(marian_config).eval()
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if weights.dim() > 1 and "embed_positions" not in name:
                    weights.mul_(scale)
            # A trained model has a bias on the output; a converter must not lose it.
            model.final_logits_bias.normal_(std=0.1)
            # The padding embedding of a published model is not zero either, but it is never the best token.
            model.final_logits_bias[0, pad] = 0.0
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]],
        decoder_start_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_length=max_length,
        num_beams=num_beams,
        pad_token_id=pad,
    )
    model.save_pretrained(path)
    return path


def _foreign(line: str) -> str:
    return " ".join(word[::-1] for word in line.split(" ")).replace("u", "\u00fc").replace("ss", "\u00df")


def _pieces(path: Path) -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(model.get_piece_size())]


def _vocabulary(pieces: list[str], language_codes: tuple[str, ...]) -> dict[str, int]:
    """</s> first, <unk> second, <pad> last: the order of the published models."""
    ordinary = [piece for piece in sorted(set(pieces)) if piece not in ("<s>", "</s>", "<unk>", "<pad>")]
    kept = [piece for index, piece in enumerate(ordinary) if index % 50 != 7]
    return {piece: i for i, piece in enumerate(["</s>", "<unk>", *language_codes, *kept, "<pad>"])}


def _level(*vocabularies: dict[str, int]) -> None:
    size = max(map(len, vocabularies))
    for vocabulary in vocabularies:
        del vocabulary["<pad>"]
        while len(vocabulary) < size - 1:
            vocabulary[f"<filler{len(vocabulary)}>"] = len(vocabulary)
        vocabulary["<pad>"] = size - 1


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
