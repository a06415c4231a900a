"""The decoding options of a request: the model's defaults filled in, every value within its bounds."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Literal

from beamline.protos import beamline_pb2 as pb
from beamline.serving.contract.backend import REPORTED
from beamline.serving.contract.manifest import DecodingDefaults
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.errors import InvalidRequest
from beamline.serving.text.languages import Direction
from beamline.serving.text.model_card import ModelCard, Tokenizer

Options = pb.DecodingOptions | pb.GenerationOptions

# Beyond these a power or a product overflows and the search compares infinities; no search is meant there.
LENGTH_PENALTY = (-10.0, 10.0)
REPETITION_PENALTY = (0.01, 100.0)
MAX_SUPPRESSED = 1024
_TRACE_CANDIDATES = 1 << 16  # of one call: all for beam 16 and 2,048 tokens, which are two megabytes to send
_TRACED_SEQUENCES = 16  # a trace is for people to look at

_EARLY_STOPPING: dict[int, bool | Literal["never"]] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}


def whole(asked: Options, name: str, default: int, lowest: int, highest: int, who: str = "this model") -> int:
    if not asked.HasField(name):
        return default
    value: int = getattr(asked, name)
    if not lowest <= value <= highest:
        raise InvalidRequest(f"{name} is {value}; {who} allows {lowest} to {highest}")
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
    if len(suppressed) > MAX_SUPPRESSED:
        raise InvalidRequest(f"suppress_tokens has {len(suppressed)} ids; at most {MAX_SUPPRESSED} are allowed")
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


# A start token, and at least one that is generated.
SHORTEST = 2


def decoding_options(
    asked: pb.DecodingOptions, card: ModelCard, target: Tokenizer, direction: Direction | None = None
) -> DecodingOptions:
    """`direction`: what the request's languages mean, for a model that knows several."""
    defaults, limits = card.defaults, card.limits
    forced_bos_id, start_id = defaults.forced_bos_id, None
    if direction is not None:
        start_id = direction.start_id
        forced_bos_id = forced_bos_id if direction.forced_bos_id is None else direction.forced_bos_id
    prefix = _prefix(asked, card, target)
    if prefix and forced_bos_id is not None:
        prefix = (forced_bos_id, *prefix)  # the text comes behind what every translation begins with
    temperature = _temperature(asked, defaults.temperature)
    beam_size, answers = _beams_or_samples(asked, card, temperature)
    max_length = whole(asked, "max_length", defaults.max_length, SHORTEST, limits.max_target_length)
    if max_length < len(prefix) + SHORTEST:
        raise InvalidRequest(
            f"target_prefix has {len(prefix)} tokens, which leaves no room for a translation within "
            f"max_length {max_length}: max_length must be at least {len(prefix) + SHORTEST} "
            f"(this model allows up to {limits.max_target_length})"
        )
    return DecodingOptions(
        beam_size=beam_size,
        num_hypotheses=answers,
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
        forced_bos_id=forced_bos_id,
        start_id=start_id,
        forced_eos_id=defaults.forced_eos_id,
        prefix=prefix,
        time_limit=time_limit(asked),
        return_alignment=asked.return_alignment,
        temperature=temperature,
        top_k=whole(asked, "top_k", defaults.top_k, 0, TOP_K),
        top_p=_top_p(asked, defaults.top_p),
        min_p=real(asked, "min_p", defaults.min_p, 0.0, 1.0),
        seed=_seed(asked) if temperature > 0 else 0,
        trace_candidates=_TRACE_CANDIDATES if asked.return_search_trace else 0,
    )


def bounded_by_source(options: DecodingOptions, defaults: DecodingDefaults, source_tokens: int) -> DecodingOptions:
    """With the max_length that the model's defaults allow for a source of so many tokens."""
    grown = math.ceil(defaults.max_length_factor * source_tokens) + defaults.max_length_extra
    longest = max(grown, options.min_length, SHORTEST) + len(options.prefix)
    return replace(options, max_length=min(options.max_length, longest))


def trace_candidates(sequences: int) -> int:
    """What the trace of each sequence of a call may hold."""
    if sequences > _TRACED_SEQUENCES:
        raise InvalidRequest(
            f"return_search_trace is for at most {_TRACED_SEQUENCES} sequences of a call, and this one has "
            f"{sequences}: leave it off, or send fewer texts"
        )
    return _TRACE_CANDIDATES // sequences


def _beams_or_samples(asked: pb.DecodingOptions, card: ModelCard, temperature: float) -> tuple[int, int]:
    """How many rows are decoded, and how many of them are answers."""
    defaults, most = card.defaults, card.limits.max_beam_size
    if temperature == 0:
        # Who turns a model's sampling off, and names no beams, wants the likeliest.
        usual = 1 if defaults.temperature > 0 and not asked.HasField("beam_size") else defaults.beam_size
        beam_size = whole(asked, "beam_size", usual, 1, most)
        return beam_size, _num_hypotheses(asked, defaults.num_hypotheses, beam_size)
    if asked.beam_size > 1:
        raise InvalidRequest(
            f"beam_size is {asked.beam_size} and temperature {temperature:g}; a beam search does not sample: "
            "set temperature to 0, or beam_size to 1 and num_hypotheses to the number of samples"
        )
    whole(asked, "beam_size", 1, 1, 1)
    samples = whole(asked, "num_hypotheses", defaults.num_hypotheses if defaults.temperature > 0 else 1, 1, most)
    return samples, samples


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


TEMPERATURE = (0.01, 100.0)  # or 0
TOP_K = 1024  # as many words as the graph's filters look at
PENALTY = (-100.0, 100.0)
MAX_STOPS = 16
MAX_STOP_LENGTH = 200  # characters
MAX_BIASED = 1024


def generation_options(asked: pb.GenerationOptions, card: ModelCard, prompt_length: int) -> DecodingOptions:
    """`num_hypotheses` is how many answers are wanted: beams or samples."""
    defaults, limits = card.defaults, card.limits
    room = limits.max_target_length - prompt_length
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_length} tokens, and this model's context is {limits.max_target_length}: "
            "there is no room for an answer"
        )
    temperature = _temperature(asked, defaults.temperature)
    beam_size, answers = _width(asked, card, temperature)
    default = min(_default_length(asked, defaults, prompt_length, room), room)
    if card.most_entries is not None:  # a default gives way; a length that was asked for is refused by the engine
        default = max(1, min(default, (card.most_entries - prompt_length) // beam_size))
    who = f"a prompt of {prompt_length} tokens, in a context of {limits.max_target_length},"
    max_tokens = whole(asked, "max_tokens", default, 1, room, who)
    min_tokens = asked.min_tokens
    if not asked.HasField("min_tokens"):  # a default gives way
        min_tokens = min(max(defaults.min_new_tokens, defaults.min_length - prompt_length, 0), max_tokens)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it may be up to max_tokens, which is {max_tokens} here")
    return DecodingOptions(
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
        forced_eos_id=None if asked.ignore_eos or temperature > 0 else defaults.forced_eos_id,
        time_limit=time_limit(asked),
        temperature=temperature,
        top_k=whole(asked, "top_k", defaults.top_k, 0, TOP_K),
        top_p=_top_p(asked, defaults.top_p),
        min_p=real(asked, "min_p", defaults.min_p, 0.0, 1.0),
        seed=_seed(asked),
        presence_penalty=real(asked, "presence_penalty", 0.0, *PENALTY),
        frequency_penalty=real(asked, "frequency_penalty", 0.0, *PENALTY),
        logit_bias=_logit_bias(asked, card),
        trace_candidates=_TRACE_CANDIDATES if asked.return_search_trace else 0,
        top_log_probs=whole(asked, "top_log_probs", 0, 0, min(REPORTED, card.vocabulary.target_size)),
    )


def _default_length(asked: pb.GenerationOptions, defaults: DecodingDefaults, prompt_length: int, room: int) -> int:
    """Of an answer: `max_new_tokens` of the checkpoint, or else what its `max_length` leaves behind the prompt."""
    if defaults.max_new_tokens or asked.HasField("max_tokens"):
        return defaults.max_new_tokens or room
    left = defaults.max_length - prompt_length
    if left < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_length} tokens, and this model's default is a max_length of "
            f"{defaults.max_length}, the prompt included: set max_tokens, up to {room}"
        )
    return left


def _seed(asked: Options) -> int:
    return asked.seed if asked.HasField("seed") else secrets.randbits(64)


def _temperature(asked: Options, default: float) -> float:
    if asked.HasField("temperature") and asked.temperature == 0:
        return 0.0
    if not asked.HasField("temperature") and asked.beam_size > 1:
        return 0.0  # who asks for beams wants no samples, whatever the model's default
    low, high = TEMPERATURE
    value = real(asked, "temperature", default, 0.0, high)
    if 0 < value < low - 1e-6:
        raise InvalidRequest(f"temperature is {value:g}; it must be 0 (no sampling) or from {low:g} to {high:g}")
    return value


def _top_p(asked: Options, default: float) -> float:
    value = asked.top_p if asked.HasField("top_p") else default
    if not 0 < value <= 1:
        raise InvalidRequest(f"top_p is {value:g}; it must be above 0, up to 1 (off)")
    return value


def _width(asked: pb.GenerationOptions, card: ModelCard, temperature: float) -> tuple[int, int]:
    """How many rows are decoded, and how many of them are answers."""
    most = card.limits.max_beam_size
    answers = whole(asked, "n", _default_answers(asked, card.defaults, temperature), 1, most)
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


def _default_answers(asked: pb.GenerationOptions, defaults: DecodingDefaults, temperature: float) -> int:
    """As many as the checkpoint says, of the search that it says."""
    if temperature > 0:
        return defaults.num_hypotheses if defaults.temperature > 0 else 1
    if asked.HasField("temperature") or defaults.temperature > 0:
        return 1
    beam_size = asked.beam_size if asked.HasField("beam_size") else defaults.beam_size
    return max(1, min(defaults.num_hypotheses, beam_size))


def _logit_bias(asked: pb.GenerationOptions, card: ModelCard) -> tuple[tuple[int, float], ...]:
    size = card.vocabulary.target_size
    if len(asked.logit_bias) > MAX_BIASED:
        raise InvalidRequest(f"logit_bias has {len(asked.logit_bias)} tokens; at most {MAX_BIASED} are allowed")
    for token, value in asked.logit_bias.items():
        if token >= size:
            raise InvalidRequest(f"logit_bias contains {token}; this model's vocabulary has ids 0 to {size - 1}")
        if not math.isfinite(value):
            raise InvalidRequest(f"logit_bias of {token} is {value}; it must be a finite number")
    return tuple(sorted(asked.logit_bias.items()))


def stop_strings(asked: Options, defaults: DecodingDefaults) -> tuple[str, ...]:
    if not asked.stop:
        return defaults.stop
    if len(asked.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(asked.stop)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(asked.stop):
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop[{index}] has {len(stop)} characters; a stop string has 1 to {MAX_STOP_LENGTH}")
    return tuple(asked.stop)
