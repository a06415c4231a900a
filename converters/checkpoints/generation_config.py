"""Hugging Face's generation_config.json -> our decoding defaults. Every setting that changes what `generate` answers is
honoured or refused; those that only say how it is computed, or what else is returned, change nothing here."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from beamline.converters.checkpoints.files import reasons_of
from beamline.serving.contract.manifest import DecodingDefaults, Limits
from beamline.serving.errors import UnsupportedCheckpoint

# What we can't do, and the values at which it does nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "constraints": ([],),
    "force_words_ids": ([],),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "forced_decoder_ids": ([],),
    "watermarking_config": ({},),
    "max_time": (),
    "token_healing": (False,),
    "dola_layers": (),
}
# At an encoder-decoder's first token; a language model's first token stands behind a prompt.
_NO_BEGINNING = {"forced_bos_token_id": ()}
_NEUTRAL_SAMPLING = {"typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": ()}
_SINGLE = {"forced_bos_token_id": "forced_bos_id", "forced_eos_token_id": "forced_eos_id"}
_SAME = ("length_penalty", "early_stopping", "min_length", "no_repeat_ngram_size", "repetition_penalty")


def decoding_defaults(content: dict[str, Any], limits: Limits, what: str) -> DecodingDefaults:
    """Of an encoder-decoder."""
    longest, shortest = content.get("max_new_tokens"), content.get("min_new_tokens")
    # Theirs do not count the start token. Where nothing is said they would stop after 20 tokens; that is nobody's wish.
    values = {"max_length": longest + 1 if longest else content.get("max_length") or limits.max_target_length}
    if shortest:
        values["min_length"] = max(shortest + 1, content.get("min_length") or 0)
    sampled, never = _sampling(content)
    return _defaults(content, {**_NEUTRAL, **never}, values | sampled, limits, what)


def language_defaults(content: dict[str, Any], limits: Limits, what: str) -> DecodingDefaults:
    """Of a language model. Where nothing is said, the limit is the model's."""
    values: dict[str, Any] = {"max_length": content.get("max_length") or limits.max_target_length}
    values["max_new_tokens"] = content.get("max_new_tokens")
    values["min_new_tokens"] = content.get("min_new_tokens") or 0
    neutral = {**_NEUTRAL, **_NO_BEGINNING}
    sampled, never = _sampling(content)
    if content.get("do_sample"):
        never = {**never, "forced_eos_token_id": ()}
    return _defaults(content, {**neutral, **never}, values | sampled, limits, what)


def _sampling(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """What a checkpoint says of sampling, and what it may not say where it samples."""
    stated = {name: content[name] for name in ("top_k", "top_p", "min_p") if content.get(name) is not None}
    if not content.get("do_sample"):
        return stated, {}
    temperature = content.get("temperature")
    # Theirs is 50, where a checkpoint that samples says nothing.
    return {"temperature": 1.0 if temperature is None else temperature, "top_k": 50, **stated}, _NEUTRAL_SAMPLING


def _against_beams(content: dict[str, Any]) -> list[str]:
    """What can't be done together with beams. Stop strings end them one by one in `generate`, and others take their
    places; ours are chosen on the device, which knows no text."""
    if (beams := content.get("num_beams") or 1) == 1:
        return []
    reasons = []
    if content.get("do_sample"):
        reasons.append(f"generation settings do_sample and num_beams {beams}: beams that are drawn are not supported")
    if content.get("stop_strings"):
        reasons.append(
            f"generation settings stop_strings and num_beams {beams}: beams that end at a text are not supported; take "
            "one of the two out of generation_config.json (a request can still name `stop`, which cuts what the search "
            "found)"
        )
    return reasons


def _defaults(
    content: dict[str, Any], neutral: dict[str, tuple[Any, ...]], known: dict[str, Any], limits: Limits, what: str
) -> DecodingDefaults:
    reasons = _against_beams(content) + [
        f"generation setting {name} is {content[name]!r}, which is not supported"
        for name, harmless in neutral.items()
        if content.get(name) is not None and content[name] not in harmless
    ]
    values: dict[str, Any] = {**{name: content[name] for name in _SAME if content.get(name) is not None}, **known}
    for theirs, ours in _SINGLE.items():
        value = content.get(theirs)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, list):
            reasons.append(f"generation setting {theirs} has {len(value)} ids; one is supported")
        elif value is not None:
            values[ours] = value
    values["beam_size"] = content.get("num_beams") or 1
    values["num_hypotheses"] = content.get("num_return_sequences") or 1
    values["bad_words"] = content.get("bad_words_ids") or ()
    values["suppress_tokens"] = content.get("suppress_tokens") or ()
    stops = content.get("stop_strings") or ()
    values["stop"] = (stops,) if isinstance(stops, str) else stops
    try:
        defaults = DecodingDefaults(**values)
    except ValidationError as error:
        reasons += reasons_of(error, "generation setting")
    if reasons:
        raise UnsupportedCheckpoint(what, reasons)
    # A published limit may be above what the model has positions for; what it can do is the limit then.
    return defaults.model_copy(
        update={
            "beam_size": min(defaults.beam_size, limits.max_beam_size),
            "max_length": min(defaults.max_length, limits.max_target_length),
        }
    )


def stated_defaults(values: object, limits: Limits, what: str) -> DecodingDefaults:
    """What a config of ours says under "decoding"; the longest output is the model's limit where it says none."""
    try:
        given = TypeAdapter(dict[str, Any]).validate_python(values)
        return DecodingDefaults(**{"max_length": limits.max_target_length, **given})
    except ValidationError as error:
        raise UnsupportedCheckpoint(what, reasons_of(error, "decoding")) from error
