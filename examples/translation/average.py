"""An exponential moving average of the weights: it validates better than any single step's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from examples.translation.models import Model, weights_of


class Average:
    def __init__(self, model: Model, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = {name: tensor.clone() for name, tensor in weights_of(model).items()}

    def update(self, model: Model) -> None:
        self.updates += 1
        # early on a long memory would only remember the initialisation
        keep = min(self.decay, self.updates / (self.updates + 10))
        current = weights_of(model)
        torch._foreach_lerp_(list(self.weights.values()), [current[n] for n in self.weights], 1 - keep)

    @contextmanager
    def in_place_of(self, model: Model) -> Iterator[None]:
        """The model computes with the average inside this block, in evaluation mode."""
        current = weights_of(model)
        kept = {name: tensor.clone() for name, tensor in current.items()}
        try:
            self._copy(self.weights, current)
            model.eval()
            yield
        finally:
            self._copy(kept, current)
            model.train()

    @staticmethod
    def _copy(origin: dict[str, Tensor], destination: dict[str, Tensor]) -> None:
        for name, tensor in destination.items():
            tensor.copy_(origin[name])
