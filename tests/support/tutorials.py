"""What a learner brings after PyTorch's own tutorials, written anew: translation with `nn.Transformer`, whose positions
are a buffer, with a vocabulary for each language."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

UNK, PAD, BOS, EOS = range(4)
SPECIAL = ["<unk>", "<pad>", "<bos>", "<eos>"]
_GERMAN = "ein kleiner Hund läuft über die grüne Wiese und zwei Kinder spielen dort ."
_ENGLISH = "a small dog runs across the green meadow and two children are playing there ."
GERMAN, ENGLISH = ([*SPECIAL, *line.split()] for line in (_GERMAN, _ENGLISH))
EMBEDDING, HEADS, HIDDEN, LAYERS, LONGEST = 32, 4, 48, 2, 64


class PositionalEncoding(nn.Module):
    pos_embedding: Tensor

    def __init__(self, size: int, dropout: float, longest: int = 5000) -> None:
        super().__init__()
        denominator = torch.exp(-torch.arange(0, size, 2) * math.log(10000) / size)
        place = torch.arange(0, longest).reshape(longest, 1)
        table = torch.zeros((longest, size))
        table[:, 0::2] = torch.sin(place * denominator)
        table[:, 1::2] = torch.cos(place * denominator)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", table.unsqueeze(-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pos_embedding[: x.size(0), :])  # type: ignore[no-any-return]


class TokenEmbedding(nn.Module):
    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.size = size

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.long()) * math.sqrt(self.size)  # type: ignore[no-any-return]


class Seq2SeqTransformer(nn.Module):
    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(EMBEDDING, HEADS, LAYERS, LAYERS, HIDDEN, dropout=0.1)
        self.generator = nn.Linear(EMBEDDING, target_words)
        self.src_tok_emb = TokenEmbedding(source_words, EMBEDDING)
        self.tgt_tok_emb = TokenEmbedding(target_words, EMBEDDING)
        self.positional_encoding = PositionalEncoding(EMBEDDING, dropout=0.1)

    def encode(self, source: Tensor) -> Tensor:
        """source [S, B]: the tutorial has time first."""
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(source)))  # type: ignore[no-any-return]

    def decode(self, target: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(0))
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(target)), memory, mask)  # type: ignore[no-any-return]


@torch.no_grad()
def greedy_decode(model: Seq2SeqTransformer, source: list[int], limit: int) -> list[int]:
    """The tutorial's own loop: the words that it wrote, without <bos> and <eos>."""
    memory = model.encode(torch.tensor(source)[:, None])
    words = [BOS]
    for _ in range(limit - 1):
        hidden = model.decode(torch.tensor(words)[:, None], memory)
        best = int(model.generator(hidden[-1]).argmax(dim=1))
        if best == EOS:
            break
        words.append(best)
    return words[1:]


def tutorial_transformer(source_words: int = len(GERMAN), target_words: int = len(ENGLISH)) -> Seq2SeqTransformer:
    torch.manual_seed(7)
    model = Seq2SeqTransformer(source_words, target_words).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.35) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def word_tokenizer(words: list[str]) -> Tokenizer:
    """Words by their place in the list; a sentence stands between <bos> and <eos>."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL[1:])
    ends = [(SPECIAL[BOS], BOS), (SPECIAL[EOS], EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    return tokenizer


def ids_of(words: list[str], text: str) -> list[int]:
    return [words.index(word) if word in words else UNK for word in text.split()]


def write_tutorial_transformer(folder: Path, model: Seq2SeqTransformer, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "transformer.pt")
    word_tokenizer(GERMAN).save(str(folder / "de.json"))
    word_tokenizer(ENGLISH).save(str(folder / "en.json"))
    german, english = "ein Hund läuft .", "a dog runs ."
    parts = {
        "family": "torch_transformer",
        "source_tokenizer": "de.json",
        "target_tokenizer": "en.json",
        "source_example": {"text": german, "ids": [BOS, *ids_of(GERMAN, german), EOS]},
        "target_example": {"text": english, "ids": ids_of(ENGLISH, english)},
        "transformer": "transformer",
        "source_embedding": "src_tok_emb.embedding.weight",
        "target_embedding": "tgt_tok_emb.embedding.weight",
        "output": "generator.weight",
        "output_bias": "generator.bias",
        "heads": HEADS,
        "max_positions": LONGEST,
        "pad_id": PAD,
        "eos_id": EOS,
        "decoder_start_id": BOS,
        **changes,
    }
    (folder / "parts.json").write_text(json.dumps({name: value for name, value in parts.items() if value is not None}))
    return folder
