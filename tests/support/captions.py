"""Show, attend and tell, as the paper has it: one image at a time, in torch.nn's words; and as ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from converters.modules.recurrent import Recurrent, RecurrentConfig
from tests.support.checkpoints import EOS, PAD, START, vocabulary_size
from tests.support.recurrent import write_recurrent

FEATURES, WIDTH, EMBEDDING, ATTENTION, LONGEST = 6, 9, 7, 5, 60


class ShowAttendTell(nn.Module):
    """It looks at a grid of feature vectors; a gate says how much of what it sees enters the next word."""

    def __init__(self) -> None:
        super().__init__()
        words = vocabulary_size()
        self.embedding = nn.Embedding(words, EMBEDDING)
        self.first_hidden, self.first_cell = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.of_state, self.of_place = nn.Linear(WIDTH, ATTENTION), nn.Linear(FEATURES, ATTENTION, bias=False)
        self.energy = nn.Linear(ATTENTION, 1, bias=False)
        self.gate = nn.Linear(WIDTH, FEATURES)
        self.cell = nn.LSTMCell(EMBEDDING + FEATURES, WIDTH)
        self.readout = nn.Linear(WIDTH + FEATURES + EMBEDDING, EMBEDDING)
        self.output = nn.Linear(EMBEDDING, words)

    def forward(self, features: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """features [1, S, f] and target [B, T] -> logits [B, T, V]; there is no padding here."""
        del mask
        rows = []
        for image, words in zip(features, target, strict=True):
            mean = image.mean(0)
            hidden, cell = self.first_hidden(mean).tanh(), self.first_cell(mean).tanh()
            answers = []
            for word in words:
                energies = self.energy((self.of_state(hidden) + self.of_place(image)).tanh())[:, 0]
                context = self.gate(hidden).sigmoid() * (energies.softmax(0) @ image)
                embedded = self.embedding(word)
                hidden, cell = self.cell(torch.cat([embedded, context]), (hidden, cell))
                answers.append(self.output(self.readout(torch.cat([hidden, context, embedded])).tanh()))
            rows.append(torch.stack(answers))
        return torch.stack(rows)


def show_attend_tell(seed: int = 0) -> ShowAttendTell:
    model = ShowAttendTell().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.dim() > 1 else 0.3, generator=generator)
        model.output.bias[EOS] += 2.0
    return model


def as_ours(model: ShowAttendTell) -> Recurrent:
    """The same weights under our names."""
    words = vocabulary_size()
    config = RecurrentConfig(
        source_vocab_size=1,
        target_vocab_size=words,
        embedding_width=EMBEDDING,
        encoder_width=1,
        decoder_width=WIDTH,
        encoder_layers=0,
        decoder_layers=1,
        pad_id=PAD,
        eos_id=EOS,
        decoder_start_id=START,
        source_features=FEATURES,
        cell="lstm",
        bridge="tanh",
        bridge_from="mean",
        attention="additive",
        attention_width=ATTENTION,
        attention_order="previous",
        context_gate="vector",
        readout="tanh",
        readout_width=EMBEDDING,
        readout_embedding=True,
        share_embeddings=False,
        tie_output=False,
        max_positions=LONGEST,
        dropout=0.0,
    )
    assert config.problems() == [], config.problems()
    ours = Recurrent(config).eval()
    names = {
        "target_embedding": "embedding",
        "bridge.projections.0": "first_hidden",
        "bridge.projections.1": "first_cell",
        "decoder.attention.query": "of_state",
        "decoder.attention.key": "of_place",
        "decoder.attention.energy": "energy",
        "decoder.gate": "gate",
        "decoder.cells.0": "cell",
        "decoder.readout": "readout",
        "output": "output",
    }
    theirs = model.state_dict()
    mapped = {}
    for name in ours.state_dict():
        module, _, part = name.rpartition(".")
        mapped[name] = theirs[f"{names[module]}.{part}"]
    ours.load_state_dict(mapped)
    return ours


def write_captioner(folder: Path, seed: int = 0) -> Path:
    return write_recurrent(folder, as_ours(show_attend_tell(seed)))
