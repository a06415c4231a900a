"""How far apart two tokens stand: what attention adds for it (relative positions), and how far it sees (windows).

Shapes in comments: B requests, T positions, C keys, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from beamline.converters.modules.transformer.config import StackConfig


class RelativeBias(nn.Module):
    """Tables by distance, from the furthest key before a token (and, where a token sees them, to the furthest behind
    it), instead of buckets that are computed in the graph."""

    def __init__(self, config: StackConfig, *, both_ways: bool) -> None:
        super().__init__()
        assert config.relative is not None
        self.per_layer = config.relative.per_layer
        self.lowest = -config.relative.max_distance
        self.highest = config.relative.max_distance if both_ways else 0
        tables = config.layers if self.per_layer else 1
        rows = self.highest - self.lowest + 1
        self.table = nn.Parameter(torch.zeros(tables, rows, config.attention.heads))

    def forward(self, distances: Tensor, visible: Tensor) -> list[Tensor]:
        """distances [B or 1, T, C] (a key's place less the token's own) and what is visible [B, 1, T, C] -> a mask
        [B, H, T, C] that is added to attention's scores: one for all layers, or one for each."""
        rows = distances.clamp(self.lowest, self.highest) - self.lowest
        return [torch.where(visible, table[rows].permute(0, 3, 1, 2), -torch.inf) for table in self.table]


class Masks:
    """What a layer's attention may see: the same for all, or within windows, or with relative positions."""

    def __init__(
        self,
        bias: RelativeBias | None,
        distances: Callable[[], Tensor],
        visible: Tensor,
        windows: tuple[int | None, ...] = (),
    ) -> None:
        """Where there are neither windows nor relative positions, nobody asks for distances."""
        self._windows = windows
        self._by_window: dict[int | None, list[Tensor]] = {None: [visible]}
        if bias is None and not windows:
            return
        apart = distances()
        for window in dict.fromkeys(windows or (None,)):
            seen = visible if window is None else visible & (apart > -window)[:, None]
            self._by_window[window] = [seen] if bias is None else bias(apart, seen)

    def __getitem__(self, layer: int) -> Tensor:
        found = self._by_window[self._windows[layer] if self._windows else None]
        return found[layer] if len(found) > 1 else found[0]


def relative_bias(config: StackConfig, *, both_ways: bool) -> RelativeBias | None:
    return None if config.relative is None else RelativeBias(config, both_ways=both_ways)


def distances_in_text(tokens: Tensor) -> Tensor:
    """[1, T, T] between the tokens [B, T] of a whole text."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places[None, :] - places[:, None])[None]
