"""Texts whose ids a user knows: the only thing that ties an embedding to the vocabulary that it was trained with.

Nothing in the weights says which word a row is of. With one embedding for both sides a wrong vocabulary shows in every
answer; with two, a model would read its sources with the wrong one and still be the model that was brought.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from beamline.serving.text.tokenizer import TextTokenizer

SHOWN = 12  # ids in a sentence


class Example(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    source: Example  # with all that the encoder reads, an end token too
    target: Example  # the words alone: neither start nor end


def problems(examples: Examples, source: TextTokenizer, target: TextTokenizer, *, shared: bool) -> list[str]:
    """Where the tokenizers don't make these ids of these texts, or where the texts would not tell them apart."""
    return [
        *_problems("source", examples.source, source.encode, None if shared else target.encode),
        *_problems("target", examples.target, target.encode_prefix, None if shared else source.encode_prefix),
    ]


def _problems(
    side: str, example: Example, encode: Callable[[str], list[int]], other: Callable[[str], list[int]] | None
) -> list[str]:
    wanted, found = list(example.ids), encode(example.text)
    what = f"{side}_example: {example.text!r}"
    if found != wanted:
        return [f"{what} must become {_shown(wanted)}, but {side}_tokenizer makes {_shown(found)} of it"]
    if not wanted or (other is not None and other(example.text) == wanted):
        return [f"{what} becomes the same ids with either tokenizer: take a text that tells them apart"]
    return []


def _shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= SHOWN else f"[{', '.join(map(str, ids[:SHOWN]))}, ...] ({len(ids)} ids)"
