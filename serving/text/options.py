"""A call's decoding options over the model's defaults, every value checked.

A value that the caller gave is never bent: it is taken, or refused with a sentence. Only a *default* gives
way where it contradicts what the caller asked for (beam_size 1 while the model's default is 4 hypotheses).
"""

from __future__ import annotations

import math
from dataclasses import replace

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.manifest import DecodingDefaults
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import ModelCard, Tokenizer
from beamline.serving.text.option_values import (
    LENGTH_PENALTY,
    REPETITION_PENALTY,
    early_stopping,
    real,
    suppress_tokens,
    time_limit,
    whole,
)

# A start token, and at least one that is generated.
_SHORTEST = 2


def decoding_options(asked: pb.DecodingOptions, card: ModelCard, target: Tokenizer) -> DecodingOptions:
    defaults, limits = card.defaults, card.limits
    prefix = _prefix(asked, card, target)
    beam_size = whole(asked, "beam_size", defaults.beam_size, 1, limits.max_beam_size)
    max_length = whole(asked, "max_length", defaults.max_length, _SHORTEST, limits.max_target_length)
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
        length_penalty=real(asked, "length_penalty", defaults.length_penalty, *LENGTH_PENALTY),
        early_stopping=early_stopping(asked, defaults.early_stopping),
        no_repeat_ngram_size=whole(
            asked, "no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, limits.max_target_length
        ),
        repetition_penalty=real(asked, "repetition_penalty", defaults.repetition_penalty, *REPETITION_PENALTY),
        bad_words=defaults.bad_words,
        suppress_tokens=suppress_tokens(asked, card),
        forced_bos_id=defaults.forced_bos_id,
        forced_eos_id=defaults.forced_eos_id,
        prefix=prefix,
        time_limit=time_limit(asked),
        return_alignment=asked.return_alignment,
    )


def bounded_by_source(options: DecodingOptions, defaults: DecodingDefaults, source_tokens: int) -> DecodingOptions:
    """With the max_length that the model's defaults allow for a source of so many tokens."""
    grown = math.ceil(defaults.max_length_factor * source_tokens) + defaults.max_length_extra
    longest = max(grown, options.min_length, _SHORTEST) + len(options.prefix)
    return replace(options, max_length=min(options.max_length, longest))


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


def _prefix(asked: pb.DecodingOptions, card: ModelCard, target: Tokenizer) -> tuple[int, ...]:
    if not asked.target_prefix:
        return ()
    prefix = tuple(target.encode_prefix(asked.target_prefix))
    if not set(prefix).isdisjoint(card.vocabulary.eos_ids):
        raise InvalidRequest("target_prefix contains the model's end token; nothing can follow it")
    return prefix
