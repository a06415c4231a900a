"""What a model offers to the graphs around it: steps over the tree, and before them an encoder or a prefill."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateTensor


class Decoder(Protocol):
    """What every family gives. Memory and states are tuples, in the order of `state_tensors`."""

    def state_tensors(self) -> list[StateTensor]: ...

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        memory: tuple[Tensor, ...],
        states: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """tokens [B, K], positions [B] -> logits [B, K, V] and the new states (caches appended to)."""


@runtime_checkable
class EncoderDecoder(Decoder, Protocol):
    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """source [B, S], source_mask [B, S] -> the memory tensors, without `source_mask`, which the server has, and
        behind them what the recurrent states begin with: [B, ...] each, the same for all beams."""

    def score(self, source: Tensor, source_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """target [B, T], with its start token -> logits [B, T, V] and attention [B, T, S]."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """A model whose source may be vectors [B, S, feature_width] instead of ids [B, S]; 0: it is not."""

    @property
    def feature_width(self) -> int: ...


def feature_width_of(model: object) -> int:
    return model.feature_width if isinstance(model, ReadsFeatures) else 0


class LanguageModel(Decoder, Protocol):
    """What a family without an encoder gives. It has no memory tensors."""

    def score(self, target: Tensor) -> Tensor:
        """target [B, T], from the text's beginning -> logits [B, T, V]"""


@runtime_checkable
class PromptReader(LanguageModel, Protocol):
    """One that takes many tokens of a prompt at once. Others are fed token by token, in forced steps."""

    def prefill(self, tokens: Tensor, positions: Tensor, tree: Tree, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """tokens [B, Q], from position positions [B] on -> the caches, appended to."""
