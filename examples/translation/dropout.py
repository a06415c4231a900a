"""Dropout that a CPU draws quickly.

PyTorch draws a float for each element on one thread: a sixth of a small Transformer's training step. One byte is
enough to decide, and NumPy's SFC64 makes eight of them at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """nn.Dropout, with its probability rounded to 1/256. Seeded from PyTorch's generator, so that a resumed run draws
    what the uninterrupted one would have drawn."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.threshold = round(256 * probability)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.threshold:
            return x
        seed = int(torch.randint(2**63 - 1, ()))
        drawn = np.random.Generator(np.random.SFC64(seed)).bytes(x.numel())
        kept = torch.frombuffer(bytearray(drawn), dtype=torch.uint8).view(x.shape) >= self.threshold
        return x * kept.to(x.dtype).mul_(256 / (256 - self.threshold))


def use_byte_dropout(model: nn.Module) -> None:
    """Replace every nn.Dropout of `model`; it has no weights, so checkpoints stay what they are."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, ByteDropout(child.p))
