"""A call's decoding options over the model's defaults, every value checked.

A value that the caller gave is never bent: it is taken, or refused with a sentence. Only a *default* gives
way where it contradicts what the caller asked for (beam_size 1 while the model's default is 4 hypotheses).
"""

from __future__ import annotations

import math
from typing import Literal

from protos import beamline_pb2 as pb
from serving.engine.request import DecodingOptions
from serving.errors import InvalidRequest
from serving.text.protocol import ModelCard, Tokenizer

# Beyond these a power or a product overflows and the search compares infinities; nobody searches there.
_LENGTH_PENALTY = (-10.0, 10.0)
_REPETITION_PENALTY = (0.01, 100.0)
_MAX_SUPPRESSED = 1024
# A start token, and at least one that is generated.
_SHORTEST = 2

_EARLY_STOPPING: dict[int, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}


def decoding_options(asked: pb.DecodingOptions, card: ModelCard, target: Tokenizer) -> DecodingOptions:
    defaults, limits = card.defaults, card.limits
    prefix = _prefix(asked, card, target)
    beam_size = _whole(asked, "beam_size", defaults.beam_size, 1, limits.max_beam_size)
    max_length = _whole(asked, "max_length", defaults.max_length, _SHORTEST, limits.max_target_length)
    if max_length < len(prefix) + _SHORTEST:
        raise InvalidRequest(
            f"target_prefix has {len(prefix)} tokens, which leaves no room for a translation within "
            f"max_length {max_length}: max_length must be at least {len(prefix) + _SHORTEST} "
            f"(this model allows up to {limits.max_target_length})"
        )
    return DecodingOptions(
        beam_size=beam_size,
        num_hypotheses=_num_hypotheses(asked, defaults.num_hypotheses, beam_size),
        max_length=max_length,
        min_length=_min_length(asked, defaults.min_length, max_length),
        length_penalty=_real(asked, "length_penalty", defaults.length_penalty, *_LENGTH_PENALTY),
        early_stopping=_early_stopping(asked, defaults.early_stopping),
        no_repeat_ngram_size=_whole(
            asked, "no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, limits.max_target_length
        ),
        repetition_penalty=_real(asked, "repetition_penalty", defaults.repetition_penalty, *_REPETITION_PENALTY),
        bad_words=defaults.bad_words,
        suppress_tokens=_suppress_tokens(asked, card),
        forced_bos_id=defaults.forced_bos_id,
        forced_eos_id=defaults.forced_eos_id,
        prefix=prefix,
        time_limit=_time_limit(asked),
        return_alignment=asked.return_alignment,
    )


def _whole(asked: pb.DecodingOptions, name: str, default: int, lowest: int, highest: int) -> int:
    if not asked.HasField(name):
        return default
    value: int = getattr(asked, name)
    if not lowest <= value <= highest:
        raise InvalidRequest(f"{name} is {value}; this model allows {lowest} to {highest}")
    return value


def _real(asked: pb.DecodingOptions, name: str, default: float, lowest: float, highest: float) -> float:
    if not asked.HasField(name):
        return default
    value: float = getattr(asked, name)
    # Single precision on the wire: 0.01 arrives as 0.0099999998, so the bounds are given that much room.
    if not math.isfinite(value) or not lowest - 1e-6 <= value <= highest + 1e-6:
        raise InvalidRequest(f"{name} is {value:g}; it must be a finite number from {lowest:g} to {highest:g}")
    return value


def _num_hypotheses(asked: pb.DecodingOptions, default: int, beam_size: int) -> int:
    if not asked.HasField("num_hypotheses"):
        return min(default, beam_size)
    if not 1 <= asked.num_hypotheses <= beam_size:
        raise InvalidRequest(f"num_hypotheses is {asked.num_hypotheses}; beam_size {beam_size} allows 1 to {beam_size}")
    return asked.num_hypotheses


def _min_length(asked: pb.DecodingOptions, default: int, max_length: int) -> int:
    if not asked.HasField("min_length"):
        return min(default, max_length)
    if asked.min_length > max_length:
        raise InvalidRequest(
            f"min_length is {asked.min_length}; it must be 0 to max_length, which is {max_length} here"
        )
    return asked.min_length


def _early_stopping(asked: pb.DecodingOptions, default: bool | Literal["never"]) -> bool | Literal["never"]:
    if asked.early_stopping == pb.EARLY_STOPPING_UNSPECIFIED:
        return default
    try:
        return _EARLY_STOPPING[asked.early_stopping]
    except KeyError:  # enums are open on the wire
        raise InvalidRequest(
            f"early_stopping is {int(asked.early_stopping)}; it must be 1 (false), 2 (true) or 3 (never)"
        ) from None


def _prefix(asked: pb.DecodingOptions, card: ModelCard, target: Tokenizer) -> tuple[int, ...]:
    if not asked.target_prefix:
        return ()
    prefix = tuple(target.encode_prefix(asked.target_prefix))
    if not set(prefix).isdisjoint(card.vocabulary.eos_ids):
        raise InvalidRequest("target_prefix contains the model's end token; nothing can follow it")
    return prefix


def _suppress_tokens(asked: pb.DecodingOptions, card: ModelCard) -> tuple[int, ...]:
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


def _time_limit(asked: pb.DecodingOptions) -> float | None:
    if not asked.HasField("time_limit_ms"):
        return None
    if asked.time_limit_ms == 0:
        raise InvalidRequest("time_limit_ms is 0; it must be at least 1, or left out for no limit")
    return asked.time_limit_ms / 1000.0
