"""The options of a Generate call over the model's defaults, every value checked."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.backend import REPORTED
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.model_card import ModelCard
from beamline.serving.text.option_values import (
    LENGTH_PENALTY,
    REPETITION_PENALTY,
    early_stopping,
    real,
    suppress_tokens,
    time_limit,
    whole,
)

_TEMPERATURE = (0.01, 100.0)  # or 0
_TOP_K = 1024  # as many words as the graph's filters look at
_PENALTY = (-100.0, 100.0)
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 200  # characters
_MAX_BIASED = 1024


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    decoding: DecodingOptions
    answers: int
    stops: tuple[str, ...]


def generation_options(asked: pb.GenerationOptions, card: ModelCard, prompt_length: int) -> GenerationOptions:
    defaults, limits = card.defaults, card.limits
    room = limits.max_target_length - prompt_length
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_length} tokens, and this model's context is {limits.max_target_length}: "
            "there is no room for an answer"
        )
    temperature = _temperature(asked, defaults.temperature)
    beam_size, answers = _width(asked, card, temperature)
    default = min(defaults.max_new_tokens or room, room)
    if card.most_entries is not None:  # a default gives way; a length that was asked for is refused by the engine
        default = max(1, min(default, (card.most_entries - prompt_length) // beam_size))
    max_tokens = whole(asked, "max_tokens", default, 1, room)
    min_tokens = asked.min_tokens
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it may be up to max_tokens, which is {max_tokens} here")
    decoding = DecodingOptions(
        beam_size=beam_size,
        num_hypotheses=answers,
        max_length=max_tokens + 1,
        # Without an end, it goes on to the limit. An end as the very last token is allowed again.
        min_length=max_tokens + 2 if asked.ignore_eos else min_tokens + 1,
        length_penalty=real(asked, "length_penalty", defaults.length_penalty, *LENGTH_PENALTY),
        early_stopping=early_stopping(asked, defaults.early_stopping),
        no_repeat_ngram_size=whole(
            asked, "no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, limits.max_target_length
        ),
        repetition_penalty=real(asked, "repetition_penalty", defaults.repetition_penalty, *REPETITION_PENALTY),
        bad_words=defaults.bad_words,
        suppress_tokens=suppress_tokens(asked, card),
        time_limit=time_limit(asked),
        temperature=temperature,
        top_k=whole(asked, "top_k", defaults.top_k, 0, _TOP_K),
        top_p=_top_p(asked, defaults.top_p),
        min_p=real(asked, "min_p", defaults.min_p, 0.0, 1.0),
        seed=asked.seed if asked.HasField("seed") else secrets.randbits(64),
        presence_penalty=real(asked, "presence_penalty", 0.0, *_PENALTY),
        frequency_penalty=real(asked, "frequency_penalty", 0.0, *_PENALTY),
        logit_bias=_logit_bias(asked, card),
        top_log_probs=whole(asked, "top_log_probs", 0, 0, min(REPORTED, card.vocabulary.target_size)),
    )
    return GenerationOptions(decoding, answers, _stops(asked))


def _temperature(asked: pb.GenerationOptions, default: float) -> float:
    if asked.HasField("temperature") and asked.temperature == 0:
        return 0.0
    if not asked.HasField("temperature") and asked.beam_size > 1:
        return 0.0  # who asks for beams wants no samples, whatever the model's default
    low, high = _TEMPERATURE
    value = real(asked, "temperature", default, 0.0, high)
    if 0 < value < low - 1e-6:
        raise InvalidRequest(f"temperature is {value:g}; it must be 0 (no sampling) or from {low:g} to {high:g}")
    return value


def _top_p(asked: pb.GenerationOptions, default: float) -> float:
    value = asked.top_p if asked.HasField("top_p") else default
    if not 0 < value <= 1:
        raise InvalidRequest(f"top_p is {value:g}; it must be above 0, up to 1 (off)")
    return value


def _width(asked: pb.GenerationOptions, card: ModelCard, temperature: float) -> tuple[int, int]:
    """How many rows are decoded, and how many of them are answers."""
    most = card.limits.max_beam_size
    answers = whole(asked, "n", 1, 1, most)
    if temperature > 0:
        if asked.beam_size > 1:
            raise InvalidRequest(
                f"beam_size is {asked.beam_size} and temperature {temperature:g}; a beam search does not sample: "
                "set temperature to 0, or beam_size to 1 and n to the number of samples"
            )
        return answers, answers
    default = card.defaults.beam_size if not asked.HasField("temperature") else 1
    beam_size = whole(asked, "beam_size", max(default, answers) if answers == 1 else default, 1, most)
    if answers > beam_size:
        raise InvalidRequest(
            f"n is {answers}, but without sampling there are only as many answers as beams, and beam_size is "
            f"{beam_size}: set temperature above 0, or beam_size to at least {answers}"
        )
    return beam_size, answers


def _logit_bias(asked: pb.GenerationOptions, card: ModelCard) -> tuple[tuple[int, float], ...]:
    size = card.vocabulary.target_size
    if len(asked.logit_bias) > _MAX_BIASED:
        raise InvalidRequest(f"logit_bias has {len(asked.logit_bias)} tokens; at most {_MAX_BIASED} are allowed")
    for token, value in asked.logit_bias.items():
        if token >= size:
            raise InvalidRequest(f"logit_bias contains {token}; this model's vocabulary has ids 0 to {size - 1}")
        if not math.isfinite(value):
            raise InvalidRequest(f"logit_bias of {token} is {value}; it must be a finite number")
    return tuple(sorted(asked.logit_bias.items()))


def _stops(asked: pb.GenerationOptions) -> tuple[str, ...]:
    if len(asked.stop) > _MAX_STOPS:
        raise InvalidRequest(f"stop has {len(asked.stop)} strings; at most {_MAX_STOPS} are allowed")
    for index, stop in enumerate(asked.stop):
        if not 0 < len(stop) <= _MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop[{index}] has {len(stop)} characters; a stop string has 1 to {_MAX_STOP_LENGTH}")
    return tuple(asked.stop)
