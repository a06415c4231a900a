"""What the weights of our modules are before they are trained."""

from __future__ import annotations

from torch import nn


def reset(model: nn.Module, embedding_width: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embedding_width**-0.5)
