"""What a module must have to be converted as it is.

Shapes in comments: B requests, K beams, S source positions, V words. A request's beams share its memory, so memory has
no beam axis; what differs between beams is a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from beamline.converters.modules.search.tree import Tree
from beamline.serving.contract.manifest import StateKind, StateTensor

DType = Literal["float32", "float16", "bool", "int64"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the server has to know about the model and can't see in its code."""

    source_vocab_size: int
    target_vocab_size: int
    pad_id: int
    eos_ids: tuple[int, ...]
    decoder_start_id: int
    max_source_length: int = 256
    max_target_length: int = 256  # the start and end tokens included
    max_beam_size: int = 16
    decoding: Mapping[str, Any] = field(default_factory=dict)  # decoding defaults, as in the manifest
    weight_names: Mapping[str, str] = field(default_factory=dict)  # the weights file's names -> the module's
    source_language: str | None = None
    target_language: str | None = None
    description: str = ""


def memory(name: str, *shape: int | Literal["S"], dtype: DType = "float32") -> StateTensor:
    """[B, *shape]: what `encode` leaves of a source; it stays as it is while the request runs."""
    return StateTensor(name=name, kind=StateKind.MEMORY, dtype=dtype, shape=("B", *shape))


def recurrent(name: str, *shape: int, dtype: DType = "float32") -> StateTensor:
    """[B, K, *shape]: a beam's own state; it follows the beam."""
    return StateTensor(name=name, kind=StateKind.RECURRENT, dtype=dtype, shape=("B", "K", *shape))


def cache(name: str, heads: int, width: int) -> StateTensor:
    """[B, heads, C, width]: an entry per step and beam. `now.tree.append` adds it; `now.tree.mask` says who sees it."""
    return StateTensor(name=name, kind=StateKind.CACHE, dtype="float32", shape=("B", heads, "C", width))


@dataclass(frozen=True)
class Step:
    """What one step of the decoder sees."""

    tokens: Tensor  # [B, K]: each beam's last word
    positions: Tensor  # [B]: how many words came before it
    memory: dict[str, Tensor]  # [B, ...] each
    states: dict[str, Tensor]  # recurrent [B, K, ...], caches [B, H, C, D]
    source_mask: Tensor | None  # [B, S], true where there is a word; None where no memory has a source axis
    tree: Tree  # which cache entries each beam sees


class Stepped(NamedTuple):
    """What it returns."""

    logits: Tensor  # [B, K, V]
    states: dict[str, Tensor]  # all of them, for the next step, in the shapes that they had
    attention: Tensor | None = None  # [B, K, S]: for alignments, where the model has any


@runtime_checkable
class OwnModule(Protocol):
    """An nn.Module follows it by having these; it need not inherit from it.

    It may also have `teacher_forced(source [B, S], source_mask [B, S], target [B, T]) -> logits [B, T, V]`, as it was
    trained: the certificate then compares with that instead of with its own steps, one by one.
    """

    settings: Settings

    def states(self) -> Sequence[StateTensor]:
        """What lives in a request's slot: `memory`, `recurrent` and `cache` tensors by name."""

    def encode(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        """source [B, S] with source_mask [B, S] -> every memory tensor, and what else `initial_state` wants. Sources
        begin at the left; what stands behind them must not change the result."""

    def initial_state(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every recurrent state as a request begins: [B, ...], without the beams, which all begin alike."""

    def step(self, now: Step) -> Stepped: ...
