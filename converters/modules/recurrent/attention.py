"""How a recurrent decoder looks at its source.

Shapes in comments: B requests, K beams (one where a target is given), S source positions, q the width of the state that
asks, m of the encoder's outputs, a of the attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from beamline.converters.modules.recurrent.config import RecurrentConfig

HIDDEN = -1e9  # the score of what can't be seen; finite, so that a softmax over it is a number


class Attention(nn.Module):
    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.kind, self.window, self.radius = config.attention, config.window, config.window_radius
        self.activation = torch.relu if config.attention_activation == "relu" else torch.tanh
        asks, sees, width = config.decoder_width, config.memory_width, config.attention_width
        if self.kind == "additive":
            self.query = nn.Linear(asks, width)
            self.key = nn.Linear(sees, width, bias=False)
            self.energy = nn.Linear(width, 1, bias=False)
        elif self.kind == "general":
            self.key = nn.Linear(sees, asks, bias=False)
        if self.window == "predictive":
            self.place = nn.Linear(asks, width, bias=False)
            self.place_energy = nn.Linear(width, 1, bias=False)

    @property
    def projects_keys(self) -> bool:
        return self.kind in ("additive", "general")

    def keys(self, values: Tensor) -> Tensor:
        """The encoder's outputs [B, S, m] as they are compared with: once per request."""
        return self.key(values) if self.projects_keys else values

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """query [B, K, q], mask [B, S], positions [B] -> context [B, K, m] and weights [B, K, S]."""
        scores = self._scores(query, keys)
        visible = mask[:, None, :]  # [B, 1, S]
        if self.window == "all":
            weights = torch.where(visible, scores, HIDDEN).softmax(-1)
        else:
            offset = torch.arange(mask.shape[1], device=mask.device) - self._centre(query, mask, positions)
            near = torch.logical_and(visible, offset.abs() <= self.radius)  # [B, K or 1, S]
            weights = torch.where(near, scores, HIDDEN).softmax(-1)
            if self.window == "predictive":
                # Luong's: a bell curve over the window, whose deviation is half the radius; not normalised again.
                weights = weights * torch.exp(offset.square() * (-2.0 / self.radius**2))
                weights = torch.where(near, weights, 0.0)
        return weights @ values, weights

    def _scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """[B, K, S]"""
        if self.kind == "additive":
            mixed = self.activation(self.query(query)[:, :, None, :] + keys[:, None, :, :])  # [B, K, S, a]
            return self.energy(mixed).squeeze(-1)  # type: ignore[no-any-return]
        scores = query @ keys.transpose(1, 2)
        return scores / math.sqrt(query.shape[-1]) if self.kind == "scaled_dot" else scores

    def _centre(self, query: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Where the window stands, [B, K, 1] or [B, 1, 1]."""
        lengths = mask.sum(1)
        if self.window == "monotonic":
            # It walks along with the target, and waits at the last word: beyond the end there would be nothing to see.
            return torch.minimum(positions, lengths - 1)[:, None, None]
        share = self.place_energy(self.place(query).tanh()).sigmoid()  # [B, K, 1]
        return share * lengths[:, None, None]  # type: ignore[no-any-return]
