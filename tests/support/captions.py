"""Show, attend and tell, as the paper has it: one image at a time, in torch.nn's words; and as ours. And as many users
have it, who followed a tutorial."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from beamline.converters.modules.recurrent.config import RecurrentConfig
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
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


@torch.no_grad()
def enliven(model: nn.Module, ends: Tensor, seed: int = 0) -> None:
    """Its captions vary, and some end: `ends` is the bias of its output."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(std=1.0 if parameter.dim() > 1 else 0.3, generator=generator)
    ends[EOS] += 2.0


def show_attend_tell() -> ShowAttendTell:
    model = ShowAttendTell().eval()
    enliven(model, model.output.bias)
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


def write_captioner(folder: Path) -> Path:
    return write_recurrent(folder, as_ours(show_attend_tell()))


# -- a tutorial's ----------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "show_attend_tell.json"
WORDS = 50


class TutorialAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_att, self.decoder_att = nn.Linear(FEATURES, ATTENTION), nn.Linear(WIDTH, ATTENTION)
        self.full_att = nn.Linear(ATTENTION, 1)

    def forward(self, features: Tensor, hidden: Tensor) -> Tensor:
        mixed = self.encoder_att(features) + self.decoder_att(hidden)[:, None]
        weights = self.full_att(mixed.relu())[:, :, 0].softmax(1)
        return (features * weights[:, :, None]).sum(1)  # type: ignore[no-any-return]


class TutorialDecoder(nn.Module):
    """ReLU in the attention, no tanh in the first states, and the output sees the state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = TutorialAttention()
        self.embedding = nn.Embedding(WORDS, EMBEDDING)
        self.decode_step = nn.LSTMCell(EMBEDDING + FEATURES, WIDTH)
        self.init_h, self.init_c = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.f_beta = nn.Linear(WIDTH, FEATURES)
        self.fc = nn.Linear(WIDTH, WORDS)

    def forward(self, features: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """features [B, S, f], all of one size, and target [B, T] -> logits [B, T, V]."""
        del mask
        mean = features.mean(1)
        state = self.init_h(mean), self.init_c(mean)
        answers = []
        for embedded in self.embedding(target).unbind(1):
            context = self.f_beta(state[0]).sigmoid() * self.attention(features, state[0])
            state = self.decode_step(torch.cat([embedded, context], dim=1), state)
            answers.append(self.fc(state[0]))
        return torch.stack(answers, dim=1)


def tutorial_decoder() -> TutorialDecoder:
    model = TutorialDecoder().eval()
    enliven(model, model.fc.bias)
    return model


def word_tokenizer() -> Tokenizer:
    """A tutorial's map of words."""
    special = {"<pad>": PAD, "<unk>": 1, "<start>": START, "<end>": EOS}
    words = {f"word{number}": number for number in range(4, WORDS)}
    tokenizer = Tokenizer(models.WordLevel({**special, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tutorial(folder: Path) -> Path:
    """With the config that the documentation shows, in our sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**json.loads(EXAMPLE.read_text()), "source_features": FEATURES, "max_positions": LONGEST}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tutorial_decoder().state_dict(), folder / "model.safetensors")
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
