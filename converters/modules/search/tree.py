"""The tree cache, seen from inside a graph.

A beam is a tree: the beams of a request share one cache row, every step appends the K new entries of a request,
and a mask says which entries are a beam's ancestors. Nothing is ever reordered or copied.
B requests, K beams, C cache entries, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def append(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """cache [B, H, C, D] with new [B, H, K, D] written at write_index [B]: one `TensorScatter`, in place where the
    runtime is given one buffer for both."""
    if torch.onnx.is_in_onnx_export():
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            (cache, new, write_index),
            {"axis": 2},
            dtype=cache.dtype,
            shape=cache.shape,
            version=24,
        )
    entries = write_index[:, None] + torch.arange(new.shape[2])  # [B, K]
    index = entries[:, None, :, None].expand(new.shape)
    return cache.scatter(2, index, new)


@dataclass(frozen=True)
class Tree:
    """Where the beams of this step stand in the cache."""

    write_index: Tensor  # [B]: where this step's K entries go
    visible: Tensor  # [B, K, C]: a beam's ancestors and itself

    @classmethod
    def grow(cls, ancestry: Tensor, write_index: Tensor) -> Tree:
        """ancestry [B, K, C] is what was there before; each beam also sees the entry that it is about to write."""
        beams = torch.arange(ancestry.shape[1])
        entries = torch.arange(ancestry.shape[2])
        own = (write_index[:, None] + beams)[:, :, None] == entries  # [B, K, C]
        return cls(write_index, torch.logical_or(ancestry, own))

    @property
    def mask(self) -> Tensor:
        return self.visible[:, None]  # [B, 1, K, C]: the same for all heads

    def distances(self) -> Tensor:
        """[B, K, C]: how far a visible entry stands from the beam's own, which is the last that it sees: 0, and less
        before it. Entries lie in the order in which they were made, so it is a count of those in between that the beam
        sees as well."""
        counts = self.visible.long().cumsum(2)
        return counts - counts[:, :, -1:]

    def append(self, cache: Tensor, new: Tensor) -> Tensor:
        return append(cache, new, self.write_index)

    def ancestry_of(self, parents: Tensor) -> Tensor:
        """The next beams' ancestry: the rows of their parents [B, K]."""
        index = parents[:, :, None].expand(-1, -1, self.visible.shape[2])
        return self.visible.gather(1, index)
