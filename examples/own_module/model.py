"""A small sequence-to-sequence model as somebody might have it: a GRU reads, a GRU with attention writes.

    beamline convert examples/own_module/model.py:build --weights W.safetensors --tokenizer source.json \
        --target-tokenizer target.json --name digits

docs/own-model.md explains every part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beamline.converters.own import Settings, Step, Stepped, memory, read_sequence, recurrent

WIDTH = 48
SOURCE_WORDS = ["<pad>", "</s>", *"0123456789"]
TARGET_WORDS = ["<pad>", "</s>", "<s>", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Digits(nn.Module):
    settings = Settings(
        source_vocab_size=len(SOURCE_WORDS),
        target_vocab_size=len(TARGET_WORDS),
        pad_id=0,
        eos_ids=(1,),
        decoder_start_id=2,
        max_source_length=32,
        max_target_length=34,
        max_beam_size=4,
        decoding={"beam_size": 1},
        description="Spells numbers, digit by digit.",
    )

    def __init__(self) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(len(SOURCE_WORDS), WIDTH)
        self.target_embedding = nn.Embedding(len(TARGET_WORDS), WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.writer = nn.GRUCell(2 * WIDTH, WIDTH)
        self.output = nn.Linear(2 * WIDTH, len(TARGET_WORDS))

    # -- the protocol ------------------------------------------------------------------------------------------------

    def states(self) -> list[object]:
        return [memory("read", "S", WIDTH), memory("summary", WIDTH), recurrent("hidden", WIDTH)]

    def encode(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        outputs, (last,) = read_sequence(self.reader, self.source_embedding(source), source_mask)
        return {"read": outputs, "summary": last.flatten(1)}

    def initial_state(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": memory["summary"].tanh()}

    def step(self, now: Step) -> Stepped:
        hidden, read = now.states["hidden"], now.memory["read"]  # [B, K, w], [B, S, w]
        scores = hidden @ read.transpose(1, 2)  # [B, K, S]
        assert now.source_mask is not None
        attention = torch.where(now.source_mask[:, None, :], scores, -1e9).softmax(-1)
        context = attention @ read
        x = torch.cat([self.target_embedding(now.tokens), context], dim=-1)
        # A cell knows one batch axis: requests and beams together.
        hidden = self.writer(x.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, now.tokens.shape)
        logits = self.output(torch.cat([hidden, context], dim=-1))
        return Stepped(logits, {"hidden": hidden}, attention)


def build() -> nn.Module:
    return Digits()
