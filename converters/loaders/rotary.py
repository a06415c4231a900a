"""Rotary positions and attention windows as transformers' configurations say them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Rules of rotary positions that are fixed once the checkpoint is known. Those that change with the length of
# a text are fixed, too, as far as the model was trained; beyond that they would turn the whole cache anew as it grows.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def rope_rules(config: Any) -> list[dict[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    found = config.rope_parameters
    return [found] if "rope_type" in found else list(found.values())


def wrong_rope(config: Any, *, partial: bool = False) -> Iterator[str]:
    """`partial`: whether some dimensions of a head may be without rotary embedding."""
    for rule in rope_rules(config):
        if rule["rope_type"] not in ROPE_TYPES:
            yield f"rope_type is {rule['rope_type']!r}; supported: {', '.join(ROPE_TYPES)}"
        if not partial and rule.get("partial_rotary_factor", 1.0) != 1.0:
            yield f"partial_rotary_factor is {rule['partial_rotary_factor']}: partial rotary embeddings"


def wrong_layers(config: Any) -> Iterator[str]:
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - {_SLIDING, _FULL}):
        yield f"layer_types has {kind!r}; supported: {_FULL}, {_SLIDING}"


def longest_text(config: Any) -> int:
    """By longrope, a text longer than those before its scaling would rotate all of its tokens by other angles."""
    positions = int(config.max_position_embeddings)
    for rule in rope_rules(config):
        if rule["rope_type"] == "longrope":
            before = rule.get("original_max_position_embeddings")
            before = before or getattr(config, "original_max_position_embeddings", None)
            positions = min(positions, before or positions)
    return positions


def windows(config: Any) -> tuple[int | None, ...]:
    """Of each layer; empty where none is shorter than the longest text."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= longest_text(config):
        return ()
    kinds = getattr(config, "layer_types", None) or [_SLIDING] * config.num_hidden_layers
    found = tuple(window if kind == _SLIDING else None for kind in kinds)
    return found if any(found) else ()


def rotary_width(config: Any, head_width: int) -> int:
    (rule,) = rope_rules(config)
    return int(head_width * rule.get("partial_rotary_factor", 1.0))


def partial_rotary(weight: Tensor, heads: int, width: int) -> Tensor:
    """The rows [heads * D, ...] of queries or keys of which the first `width` of D are rotated, in the order of a
    rotary embedding over all D: of a pair that is rotated together, one stands in either half of the head. Products of
    queries and keys stay what they are."""
    rows: Tensor = weight.unflatten(0, (heads, -1))  # type: ignore[no-untyped-call]
    half, rest = width // 2, (rows.shape[1] - width) // 2
    places = torch.arange(rows.shape[1])
    order = torch.cat(
        [places[:half], places[width : width + rest], places[half:width], places[width + rest :]],
    )
    return rows[:, order].flatten(0, 1)
