"""Trains `Digits` for half a minute, writes what `beamline convert` wants: python -m examples.own_module.train OUT"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import cross_entropy

from beamline.converters.own.steps import OwnSteps
from examples.own_module.model import SOURCE_WORDS, TARGET_WORDS, Digits

LONGEST = 8


def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Digits, with an end token behind them; and words."""

    def of(words: list[str]) -> Tokenizer:
        made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
        made.add_special_tokens([word for word in words if word.startswith("<")])
        return made

    source, target = of(SOURCE_WORDS), of(TARGET_WORDS)
    source.pre_tokenizer = Split(Regex("."), "isolated")
    source.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    target.pre_tokenizer = WhitespaceSplit()
    return source, target


def batch(chance: random.Random, size: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """source, its mask, target and labels, padded."""
    numbers = [[chance.randrange(10) for _ in range(chance.randint(1, LONGEST))] for _ in range(size)]

    def padded(rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])

    source = padded([[digit + 2 for digit in number] + [1] for number in numbers])
    target = padded([[2] + [digit + 3 for digit in number] for number in numbers])
    labels = padded([[digit + 3 for digit in number] + [1] for number in numbers])
    return source, source != 0, target, labels


def train(steps: int = 1000) -> Digits:
    torch.manual_seed(0)
    model = Digits()
    teacher = OwnSteps(model)  # its teacher-forced pass goes through `step`, as the server will
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)  # so that it settles, on any machine
    chance = random.Random(0)
    for _ in range(steps):
        source, mask, target, labels = batch(chance)
        logits, _ = teacher.score(source, mask, target)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decay.step()
    return model.eval()


def write(model: Digits, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "weights.safetensors")
    for name, tokenizer in zip(("source", "target"), tokenizers(), strict=True):
        tokenizer.save(str(folder / f"{name}.json"))


if __name__ == "__main__":
    write(train(), Path(sys.argv[1]))
