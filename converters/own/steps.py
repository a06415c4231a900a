"""A user's module as an `EncoderDecoder`: names become positions, and the teacher-forced pass a loop of its steps."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from beamline.converters.modules.loop import over_time
from beamline.converters.modules.search.tree import Tree
from beamline.converters.own.layers import trace_as_cells
from beamline.converters.own.protocol import OwnModule, Step, Stepped
from beamline.serving.contract.manifest import StateKind, StateTensor

SOURCE_MASK = StateTensor(name="source_mask", kind=StateKind.MEMORY, dtype="bool", shape=("B", "S"))


class OwnSteps(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        trace_as_cells(module)
        self.own = cast(OwnModule, module)
        declared = list(self.own.states())
        self.memories = [tensor for tensor in declared if tensor.kind is StateKind.MEMORY]
        self.kept = [tensor for tensor in declared if tensor.kind is not StateKind.MEMORY]
        self.sees_source = any("S" in tensor.shape for tensor in self.memories)

    def state_tensors(self) -> list[StateTensor]:
        return [*([SOURCE_MASK] if self.sees_source else []), *self.memories, *self.kept]

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        memory, start = self.begin(source, source_mask)
        return (*(memory[tensor.name] for tensor in self.memories), *start.values())

    def begin(self, source: Tensor, source_mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The memory, and the recurrent states without beams, in the order that was declared."""
        memory = self.own.encode(source, source_mask)
        start = self.own.initial_state(memory)
        return memory, {t.name: start[t.name] for t in self.kept if t.kind is StateKind.RECURRENT}

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        mask = memory[0] if self.sees_source else None
        named = dict(zip((t.name for t in self.memories), memory[self.sees_source :], strict=True))
        before = dict(zip((t.name for t in self.kept), states, strict=True))
        stepped = self.own.step(Step(tokens, positions, named, before, mask, tree))
        return stepped.logits, tuple(stepped.states[tensor.name] for tensor in self.kept)

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """One beam, step after step; a cache has one entry per position."""
        memory, start = self.begin(source, source_mask)
        length = target.shape[1]
        carried = []
        for tensor in self.kept:
            if tensor.kind is StateKind.RECURRENT:
                carried.append(start[tensor.name][:, None])
            else:
                heads, width = cast(int, tensor.shape[1]), cast(int, tensor.shape[3])
                carried.append(torch.zeros(source.shape[0], heads, length, width))

        def body(
            states: tuple[Tensor, ...], tokens: Tensor, positions: Tensor
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            visible = torch.arange(length) <= positions[:, None, None]
            before = dict(zip((t.name for t in self.kept), states, strict=True))
            mask = source_mask if self.sees_source else None
            stepped: Stepped = self.own.step(Step(tokens, positions, memory, before, mask, Tree(positions, visible)))
            after = tuple(stepped.states[tensor.name] for tensor in self.kept)
            return after, (stepped.logits, *([] if stepped.attention is None else [stepped.attention]))

        logits, *attention = over_time(body, tuple(carried), target)
        if attention:
            return logits, attention[0]
        uniform = source_mask[:, None, :].expand(-1, length, -1).float()
        return logits, uniform / uniform.sum(-1, keepdim=True)
