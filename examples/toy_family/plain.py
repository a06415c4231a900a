"""A language model of letters as somebody might have it, in plain PyTorch: it makes up names of towns.

    python -m examples.toy_family.plain towns      # trains it, and writes a checkpoint: config.json, weights, tokenizer

Nothing here knows of beamline. docs/add-a-family.md makes a family of it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Made up; a town begins and ends with the token 0.
_ROOTS = "alten auen berg birken buchen eichen erlen hohen kirch linden neuen rosen stein tannen wald weiden wiesen"
TOWNS = [root + end for root in _ROOTS.split(" ") for end in ("au", "bach", "feld")]
LETTERS = ["<end>", "<unk>", *sorted({letter for town in TOWNS for letter in town})]
LONGEST = 24
END = 0


class TownLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        read = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.before_mlp(x)).relu())  # type: ignore[no-any-return]


class TownModel(nn.Module):
    def __init__(self, letters: int, width: int, heads: int, layers: int, longest: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(TownLayer(width, heads) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, letters] for what follows each."""
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last_norm(x))  # type: ignore[no-any-return]


def config() -> dict[str, int]:
    return {"letters": len(LETTERS), "width": 32, "heads": 4, "layers": 2, "longest": LONGEST}


def train(steps: int = 300) -> TownModel:
    torch.manual_seed(0)
    model = TownModel(**config())
    rows = [[END, *(LETTERS.index(letter) for letter in town), END] for town in TOWNS]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [-1] * (longest - len(row)) for row in rows])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        logits = model(tokens[:, :-1].clamp(min=0))
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def write(model: TownModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "towns", **config()}))
    save_file(model.state_dict(), folder / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model: threads would wait for each other, on a busy machine for minutes
    write(train(), Path(sys.argv[1]))
