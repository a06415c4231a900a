"""Recurrent models as their users have written them: tutorials' code, on torch.nn's layers. Nothing of it is ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.checkpoints import EOS, PAD, START, both_sides, sentencepiece_model, vocabulary_size

LONGEST = 40


def packed_run(layer: nn.Module, x: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    outputs, state = layer(packed)
    return pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])[0], state


def looked_at(scores: Tensor, mask: Tensor, outputs: Tensor) -> Tensor:
    """scores [B, S], outputs [B, S, m] -> the mean [B, m] that their softmax makes."""
    return (scores.masked_fill(~mask, -1e10).softmax(1)[:, :, None] * outputs).sum(1)


class UserModel(nn.Module):
    parts: ClassVar[dict[str, Any]]  # what differs from these names in its config
    USUAL: ClassVar[dict[str, Any]] = {
        "encoder": "enc",
        "decoder": "dec",
        "source_embedding": "embed.weight",
        "target_embedding": "embed.weight",
        "output": "out.weight",
        "output_bias": "out.bias",
    }


class Additive(UserModel):
    """Bahdanau's, as in many tutorials: one layer over query and key, the output sees all there is."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.source = nn.Embedding(size, 9)
        self.target = nn.Embedding(size, 9)
        self.rnn = nn.GRU(9, 6, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(12, 10)
        self.attn = nn.Linear(10 + 12, 8)
        self.v = nn.Linear(8, 1, bias=False)
        self.decoder = nn.GRU(12 + 9, 10, batch_first=True)
        self.fc_out = nn.Linear(12 + 10 + 9, size)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        outputs, state = packed_run(self.rnn, self.source(source), mask.sum(1))
        hidden = torch.tanh(self.fc(torch.cat([state[0], state[1]], dim=1)))
        logits = []
        for word in target.T:
            embedded = self.target(word)
            repeated = hidden[:, None].repeat(1, source.shape[1], 1)
            energy = self.v(torch.tanh(self.attn(torch.cat([repeated, outputs], dim=2))))[:, :, 0]
            context = looked_at(energy, mask, outputs)
            output, hidden = self.decoder(torch.cat([context, embedded], dim=1)[:, None], hidden[None])
            hidden = hidden[0]
            logits.append(self.fc_out(torch.cat([output[:, 0], context, embedded], dim=1)))
        return torch.stack(logits, dim=1)

    parts: ClassVar[dict[str, Any]] = {
        "encoder": "rnn",
        "decoder": "decoder",
        "source_embedding": "source.weight",
        "target_embedding": "target.weight",
        "output": "fc_out.weight",
        "output_bias": "fc_out.bias",
        "bridge": "tanh",
        "bridge_hidden": ["fc"],
        "attention": "additive",
        "attention_order": "previous",
        "attention_query": "attn",
        "attention_key": "attn",
        "attention_energy": "v",
        "decoder_input": ["context", "embedding"],
        "readout_input": ["hidden", "context", "embedding"],
    }


class Luong(UserModel):
    """General attention, input feeding, two LSTM layers, a tied output."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.embed = nn.Embedding(size, 10)
        self.enc = nn.LSTM(10, 8, num_layers=2, batch_first=True)
        self.dec = nn.LSTM(10 + 10, 8, num_layers=2, batch_first=True)
        self.wa = nn.Linear(8, 8)
        self.wc = nn.Linear(16, 10, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        outputs, state = packed_run(self.enc, self.embed(source), mask.sum(1))
        attentional = torch.zeros(len(source), 10)
        logits = []
        for word in target.T:
            x = torch.cat([attentional, self.embed(word)], dim=1)
            output, state = self.dec(x[:, None], state)
            scores = torch.einsum("bq,bsq->bs", output[:, 0], self.wa(outputs))
            context = looked_at(scores, mask, outputs)
            attentional = torch.tanh(self.wc(torch.cat([context, output[:, 0]], dim=1)))
            logits.append(attentional @ self.embed.weight.T + self.bias)
        return torch.stack(logits, dim=1)

    parts: ClassVar[dict[str, Any]] = {
        "output": "embed.weight",
        "output_bias": "bias",
        "bridge": "copy",
        "attention": "general",
        "attention_key": "wa",
        "decoder_input": ["fed", "embedding"],
        "readout": "wc",
        "readout_input": ["context", "hidden"],
    }


class Sutskever(UserModel):
    """No attention: the reversed source in one state, which is where the decoder begins."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.source, self.target = nn.Embedding(size, 7), nn.Embedding(size, 7)
        self.encoder = nn.LSTM(7, 9, num_layers=3, bias=False, batch_first=True)
        self.decoder = nn.LSTM(7, 9, num_layers=3, batch_first=True)
        self.output = nn.Linear(9, size)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        lengths = mask.sum(1)
        reversed_source = torch.stack(
            [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(source, lengths.tolist(), strict=True)]
        )
        _, state = packed_run(self.encoder, self.source(reversed_source), lengths)
        return self.output(self.decoder(self.target(target), state)[0])  # type: ignore[no-any-return]

    parts: ClassVar[dict[str, Any]] = {
        "encoder": "encoder",
        "decoder": "decoder",
        "source_embedding": "source.weight",
        "target_embedding": "target.weight",
        "output": "output.weight",
        "output_bias": "output.bias",
        "reverse_source": True,
    }


class Cho(UserModel):
    """One vector for the source, which enters every step of a GRUCell."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.embed = nn.Embedding(size, 7)
        self.enc = nn.GRU(7, 9, batch_first=True)
        self.start = nn.Linear(9, 11)
        self.cell = nn.GRUCell(7 + 9, 11)
        self.out = nn.Linear(11 + 9 + 7, size, bias=False)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        _, state = packed_run(self.enc, self.embed(source), mask.sum(1))
        context, hidden = state[0], self.start(state[0])
        logits = []
        for word in target.T:
            embedded = self.embed(word)
            hidden = self.cell(torch.cat([embedded, context], dim=1), hidden)
            logits.append(self.out(torch.cat([embedded, hidden, context], dim=1)))
        return torch.stack(logits, dim=1)

    parts: ClassVar[dict[str, Any]] = {
        "output_bias": None,
        "decoder": "cell",
        "bridge": "linear",
        "bridge_hidden": ["start"],
        "decoder_input": ["embedding", "context"],
        "readout_input": ["embedding", "hidden", "context"],
    }


class Elman(UserModel):
    """Plain ReLU units in both directions, summed; scaled dot attention; the decoder begins with nothing."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.embed = nn.Embedding(size, 7)
        self.enc = nn.RNN(7, 8, nonlinearity="relu", bidirectional=True, batch_first=True)
        self.dec = nn.RNN(7, 8, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(16, size)

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        outputs, _ = packed_run(self.enc, self.embed(source), mask.sum(1))
        memory = outputs[:, :, :8] + outputs[:, :, 8:]
        hidden, _ = self.dec(self.embed(target))
        weights = (hidden @ memory.mT / 8**0.5).masked_fill(~mask[:, None], float("-inf")).softmax(2)
        return self.out(torch.cat([weights @ memory, hidden], dim=2))  # type: ignore[no-any-return]

    parts: ClassVar[dict[str, Any]] = {
        "nonlinearity": "relu",
        "merge": "sum",
        "bridge": "zero",
        "attention": "scaled_dot",
        "readout_input": ["context", "hidden"],
    }


class OpenNmt(UserModel):
    """As OpenNMT-py names them: a bidirectional encoder, cells above each other that are fed, and a matrix that turns
    the state before it is compared with the memory."""

    def __init__(self) -> None:
        super().__init__()
        size = vocabulary_size()
        self.encoder, self.decoder = nn.ModuleDict(), nn.ModuleDict()
        self.encoder["embeddings"], self.decoder["embeddings"] = nn.Embedding(size, 7), nn.Embedding(size, 7)
        self.encoder["rnn"] = nn.LSTM(7, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.decoder["rnn"] = nn.ModuleDict({"layers": nn.ModuleList([nn.LSTMCell(7 + 8, 8), nn.LSTMCell(8, 8)])})
        self.decoder["attn"] = nn.ModuleDict(
            {"linear_in": nn.Linear(8, 8, bias=False), "linear_out": nn.Linear(16, 8, bias=False)}
        )
        self.generator = nn.Sequential(nn.Linear(8, size))

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        outputs, ends = packed_run(self.encoder["rnn"], self.encoder["embeddings"](source), mask.sum(1))
        # [layers * directions, B, 4] -> by layer [B, 8]
        hidden, cell = ([torch.cat([end[i], end[i + 1]], dim=1) for i in (0, 2)] for end in ends)
        states, fed = list(zip(hidden, cell, strict=True)), torch.zeros(len(source), 8)
        attention: Any = self.decoder["attn"]
        logits = []
        for word in target.T:
            x = torch.cat([self.decoder["embeddings"](word), fed], dim=1)
            for number, layer in enumerate(self.decoder["rnn"]["layers"]):  # type: ignore[index]
                states[number] = layer(x, states[number])
                x = states[number][0]
            scores = (attention["linear_in"](x)[:, None] * outputs).sum(2)
            fed = torch.tanh(attention["linear_out"](torch.cat([looked_at(scores, mask, outputs), x], dim=1)))
            logits.append(self.generator(fed))
        return torch.stack(logits, dim=1)

    parts: ClassVar[dict[str, Any]] = {
        "encoder": "encoder.rnn",
        "decoder": ["decoder.rnn.layers.0", "decoder.rnn.layers.1"],
        "source_embedding": "encoder.embeddings.weight",
        "target_embedding": "decoder.embeddings.weight",
        "output": "generator.0.weight",
        "output_bias": "generator.0.bias",
        "attention": "general",
        "attention_query": "decoder.attn.linear_in",
        "decoder_input": ["embedding", "fed"],
        "readout": "decoder.attn.linear_out",
        "readout_input": ["context", "hidden"],
    }


USER_MODELS: tuple[type[UserModel], ...] = (Additive, Luong, Sutskever, Cho, Elman, OpenNmt)


def user_model(kind: type[UserModel], seed: int = 0) -> UserModel:
    model = kind().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return model


def write_user_model(folder: Path, model: UserModel, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"max_positions": LONGEST, "pad_id": PAD, "eos_id": EOS, "decoder_start_id": START}
    content = {"family": "torch_recurrent", **UserModel.USUAL, **model.parts, **ids}
    if content.get("source_embedding") not in (None, content["target_embedding"]):
        content |= both_sides()
    content |= changes
    (folder / "config.json").write_text(json.dumps({name: v for name, v in content.items() if v is not None}))
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors")
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder
