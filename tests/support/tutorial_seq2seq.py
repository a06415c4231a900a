"""PyTorch's seq2seq tutorial as a learner has it, written anew: a GRU reads, one with Bahdanau's attention writes. Its
three modules are as they were trained; `Tutorial`, below them, is what the learner adds to have them served."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beamline.converters.own import Settings, Step, Stepped, memory, read_sequence, recurrent

SOS, EOS = 0, 1
HIDDEN, WORDS_IN, WORDS_OUT, LONGEST = 24, 20, 23, 20


class EncoderRNN(nn.Module):
    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.dropout(self.embedding(tokens)))  # type: ignore[no-any-return]


class BahdanauAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.Wa = nn.Linear(hidden, hidden)
        self.Ua = nn.Linear(hidden, hidden)
        self.Va = nn.Linear(hidden, 1)

    def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.attention = BahdanauAttention(hidden)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, words)
        self.dropout = nn.Dropout(0.1)

    def forward_step(self, word: Tensor, hidden: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """word [B, 1], hidden [1, B, h], encoded [B, S, h]."""
        embedded = self.dropout(self.embedding(word))
        context, _ = self.attention(hidden.permute(1, 0, 2), encoded)
        output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
        return self.out(output), hidden


@torch.no_grad()
def evaluate(encoder: EncoderRNN, decoder: AttnDecoderRNN, source: list[int], limit: int) -> list[int]:
    """The tutorial's own greedy loop, for one sentence."""
    encoded, hidden = encoder(torch.tensor([source]))
    words = [SOS]
    for _ in range(limit - 1):
        logits, hidden = decoder.forward_step(torch.tensor([[words[-1]]]), hidden, encoded)
        words.append(int(logits[0, 0].argmax()))
        if words[-1] == EOS:
            break
    return words[1:]


class Tutorial(nn.Module):
    settings = Settings(
        source_vocab_size=WORDS_IN,
        target_vocab_size=WORDS_OUT,
        pad_id=SOS,
        eos_ids=(EOS,),
        decoder_start_id=SOS,
        max_source_length=LONGEST,
        max_target_length=LONGEST,
        max_beam_size=4,
        decoding={"beam_size": 1},
    )

    def __init__(self) -> None:
        super().__init__()
        self.encoder = EncoderRNN(WORDS_IN, HIDDEN)
        self.decoder = AttnDecoderRNN(HIDDEN, WORDS_OUT)

    def states(self) -> list[object]:
        return [memory("encoded", "S", HIDDEN), memory("last", HIDDEN), recurrent("hidden", HIDDEN)]

    def encode(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        encoded, (last,) = read_sequence(self.encoder.gru, self.encoder.embedding(source), source_mask)
        return {"encoded": encoded, "last": last[:, 0]}

    def initial_state(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": memory["last"]}

    def step(self, now: Step) -> Stepped:
        hidden, encoded, attention = now.states["hidden"], now.memory["encoded"], self.decoder.attention
        assert now.source_mask is not None
        # The tutorial's attention, with an axis for beams, and without looking behind a source's end.
        scores = attention.Va(torch.tanh(attention.Wa(hidden)[:, :, None] + attention.Ua(encoded)[:, None])).squeeze(3)
        weights = scores.masked_fill(~now.source_mask[:, None], -1e9).softmax(-1)  # [B, K, S]
        x = torch.cat((self.decoder.embedding(now.tokens), weights @ encoded), dim=2)
        # The GRU has one axis for sentences: requests and beams together.
        output, hidden = self.decoder.gru(x.flatten(0, 1).unsqueeze(1), hidden.flatten(0, 1).unsqueeze(0))
        logits = self.decoder.out(output.squeeze(1)).unflatten(0, now.tokens.shape)
        return Stepped(logits, {"hidden": hidden.squeeze(0).unflatten(0, now.tokens.shape)}, weights)


def build() -> nn.Module:
    return Tutorial()
