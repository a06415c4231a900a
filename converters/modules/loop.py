"""A loop over target positions: Python's own where PyTorch runs, one `Scan` in a graph, whose length is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

Tensors = tuple[Tensor, ...]


def over_time(
    body: Callable[[Tensors, Tensor, Tensor], tuple[Tensors, Tensors]], carried: Tensors, x: Tensor
) -> Tensors:
    """body(carried, x [B, 1, ...], position [B]) -> carried for the next position, and outputs [B, 1, ...].
    x [B, T, ...] -> all positions' outputs [B, T, ...]."""
    batch, length = x.shape[:2]
    if not torch.onnx.is_in_onnx_export():
        collected: list[Tensors] = []
        for place in range(length):
            position = torch.full((batch,), place, device=x.device)
            carried, outputs = body(carried, x[:, place : place + 1], position)
            collected.append(outputs)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*collected, strict=True))

    def scanned(carried: Tensors, now: tuple[Tensor, Tensor]) -> tuple[Tensors, Tensors]:
        carried, outputs = body(carried, now[0][:, None], now[1].expand(batch))
        # A scan may not return one tensor twice, nor carry one that lies otherwise in memory than it was given: a
        # module may have transposed it. The copies disappear in the graph.
        return tuple(map(_copied, carried)), tuple(output.squeeze(1).clone() for output in outputs)

    places = torch.arange(length)[:, None]
    _, outputs = scan(scanned, tuple(map(_copied, carried)), (x.transpose(0, 1), places), dim=0)
    return tuple(output.transpose(0, 1) for output in cast(Tensors, outputs))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
