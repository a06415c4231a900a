"""Small classifiers with random weights: ours, and as a user might have them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from beamline.converters.families.reference_recurrent_pooled import ReferenceRecurrentPooledConverter
from beamline.converters.modules.recurrent.pooled import PooledConfig, RecurrentPooled
from tests.support.checkpoints import PAD, sentencepiece_model, vocabulary_size

LABELS = ("bad", "fair", "good")


def pooled_config(**changes: Any) -> PooledConfig:
    shape: dict[str, Any] = {
        "vocab_size": vocabulary_size(),
        "embedding_width": 10,
        "encoder_width": 7,
        "encoder_layers": 2,
        "pad_id": PAD,
        "labels": LABELS,
        "pooling": "attention",
        "attention_width": 6,
        "head_width": 9,
        "cell": "lstm",
        "bidirectional": "all",
        "max_positions": 64,
        "dropout": 0.0,
    }
    return PooledConfig(**{**shape, **changes})


def pooled_model(config: PooledConfig, seed: int = 0) -> RecurrentPooled:
    model = RecurrentPooled(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.8, generator=generator)
    return model


def write_pooled(folder: Path, model: RecurrentPooled, **beside: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "beamline_recurrent_pooled", **model.config.to_json(), **beside}
    (folder / "config.json").write_text(json.dumps(content))
    save_file({name: each.detach().clone() for name, each in model.named_parameters()}, folder / "model.safetensors")
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder


def write_pooled_repository(folder: Path) -> None:
    """A small classifier as version 1 of `mood`."""
    with tempfile.TemporaryDirectory() as source:
        write_pooled(Path(source), pooled_model(pooled_config()))
        ReferenceRecurrentPooledConverter(Path(source)).convert("mood", folder)


class UserClassifier(nn.Module):
    """What a tutorial has: the last states of a bidirectional LSTM, and two layers."""

    CONFIG: dict[str, Any] = {"encoder": "lstm", "pooling": "last", "head": "fc1", "output": "fc2"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size(), 9)
        self.lstm = nn.LSTM(9, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, source: Tensor) -> Tensor:
        """One text without padding."""
        _, (hidden, _) = self.lstm(self.embedding(source))
        return self.fc2(self.fc1(torch.cat([hidden[-2], hidden[-1]], dim=1)).relu()).softmax(1)  # type: ignore[no-any-return]


class UserAttention(nn.Module):
    """A GRU whose states are weighed by a learned query."""

    CONFIG: dict[str, Any] = {  # noqa: RUF012
        "encoder": "gru",
        "pooling": "attention",
        "query": "query",
        "query_projection": "project",
        "output": "out",
        "multi_label": True,
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size(), 6)
        self.gru = nn.GRU(6, 7, batch_first=True)
        self.project, self.query = nn.Linear(7, 4), nn.Parameter(torch.empty(4))
        self.out = nn.Linear(7, 3)

    def forward(self, source: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(source))
        weights = (self.project(states).tanh() @ self.query).softmax(1)
        return self.out((weights[:, :, None] * states).sum(1)).sigmoid()  # type: ignore[no-any-return]


class UserAverage(nn.Module):
    """A plain RNN, averaged."""

    CONFIG: dict[str, Any] = {"encoder": "rnn", "pooling": "mean", "output": "out", "nonlinearity": "relu"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size(), 6)
        self.rnn = nn.RNN(6, 7, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, source: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(source))
        return self.out(states.mean(1)).softmax(1)  # type: ignore[no-any-return]


USERS = (UserClassifier, UserAttention, UserAverage)


def write_user(folder: Path, model: nn.Module, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    config = {"family": "torch_recurrent_pooled", "embedding": "embedding.weight", "labels": LABELS, "pad_id": PAD}
    own = dict(model.CONFIG)  # type: ignore[arg-type]
    (folder / "config.json").write_text(json.dumps({**config, "max_positions": 64, **own, **changes}))
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "spm.model").write_bytes(sentencepiece_model())
    return folder
