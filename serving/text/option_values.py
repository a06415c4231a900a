"""Checks of single values of a call, the same for every kind of call: taken as they are, or refused with a sentence."""

from __future__ import annotations

import math
from typing import Literal

from beamline.protos import beamline_pb2 as pb
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import ModelCard

Options = pb.DecodingOptions | pb.GenerationOptions

# Beyond these a power or a product overflows and the search compares infinities; nobody searches there.
LENGTH_PENALTY = (-10.0, 10.0)
REPETITION_PENALTY = (0.01, 100.0)
_MAX_SUPPRESSED = 1024

_EARLY_STOPPING: dict[int, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}


def whole(asked: Options, name: str, default: int, lowest: int, highest: int) -> int:
    if not asked.HasField(name):
        return default
    value: int = getattr(asked, name)
    if not lowest <= value <= highest:
        raise InvalidRequest(f"{name} is {value}; this model allows {lowest} to {highest}")
    return value


def real(asked: Options, name: str, default: float, lowest: float, highest: float) -> float:
    if not asked.HasField(name):
        return default
    value: float = getattr(asked, name)
    # Single precision on the wire: 0.01 arrives as 0.0099999998, so the bounds are given that much room.
    if not math.isfinite(value) or not lowest - 1e-6 <= value <= highest + 1e-6:
        raise InvalidRequest(f"{name} is {value:g}; it must be a finite number from {lowest:g} to {highest:g}")
    return value


def early_stopping(asked: Options, default: bool | Literal["never"]) -> bool | Literal["never"]:
    if asked.early_stopping == pb.EARLY_STOPPING_UNSPECIFIED:
        return default
    try:
        return _EARLY_STOPPING[asked.early_stopping]
    except KeyError:  # enums are open on the wire
        raise InvalidRequest(
            f"early_stopping is {int(asked.early_stopping)}; it must be 1 (false), 2 (true) or 3 (never)"
        ) from None


def suppress_tokens(asked: Options, card: ModelCard) -> tuple[int, ...]:
    """Replaces the model's list, as every option replaces its default."""
    if not asked.suppress_tokens:
        return card.defaults.suppress_tokens
    suppressed = sorted(set(asked.suppress_tokens))
    size = card.vocabulary.target_size
    if suppressed[-1] >= size:
        raise InvalidRequest(
            f"suppress_tokens contains {suppressed[-1]}; this model's target vocabulary has ids 0 to {size - 1}"
        )
    if len(suppressed) > _MAX_SUPPRESSED:
        raise InvalidRequest(f"suppress_tokens has {len(suppressed)} ids; at most {_MAX_SUPPRESSED} are allowed")
    if set(card.vocabulary.eos_ids) <= set(suppressed):
        raise InvalidRequest(
            f"suppress_tokens contains every end token ({', '.join(map(str, card.vocabulary.eos_ids))}), "
            "so no translation could end; leave out at least one"
        )
    return tuple(suppressed)


def time_limit(asked: Options) -> float | None:
    if not asked.HasField("time_limit_ms"):
        return None
    if asked.time_limit_ms == 0:
        raise InvalidRequest("time_limit_ms is 0; it must be at least 1, or left out for no limit")
    return asked.time_limit_ms / 1000.0
