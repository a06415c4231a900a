"""Request parameters as our own options: the names of `beamline.v1`'s DecodingOptions, for a language model of its
GenerationOptions, for a model that classifies or embeds of those requests' fields; and the few that Triton reserves.

    timeout    microseconds that the request may wait for a slot; 0: no limit
    priority   1 (most urgent) to 4; 0: the default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.contract.call import LOWEST_PRIORITY
from beamline.serving.errors import InvalidRequest


@dataclass(slots=True)
class PooledOptions:
    """Of a model that classifies or embeds. None: as the model does."""

    top_k: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None


Options = pb.DecodingOptions | pb.GenerationOptions | PooledOptions

_EARLY_STOPPING = {
    False: pb.EARLY_STOPPING_FALSE,
    True: pb.EARLY_STOPPING_TRUE,
    "false": pb.EARLY_STOPPING_FALSE,
    "true": pb.EARLY_STOPPING_TRUE,
    "never": pb.EARLY_STOPPING_NEVER,
}
# The outputs that a request asks for decide what is returned; what no output can hold is not offered here.
_OUTPUTS = {"return_scores": "score", "return_log_probs": "score", "return_tokens": "token_ids"}
_UNAVAILABLE = ("return_alignment", "top_log_probs")
_LANGUAGES = ("source_language", "target_language")
_LARGEST = {"uint32": 2**32 - 1, "uint64": 2**64 - 1}
_IDS = "ids with commas between them"
_MOST_DIGITS = 20  # of an id: more than any has


@dataclass(slots=True)
class Parameters:
    options: Any  # one of `Options`
    languages: dict[str, str] = field(default_factory=dict)
    queue_timeout: float | None = None  # seconds; None: as the call's metadata says
    priority: int | None = None
    stream: bool = False  # many responses, each sent as soon as it is there
    empty_final: bool = False  # Triton's: an empty response follows the last one of a stream


def read_parameters(given: Mapping[str, oip.InferParameter], options: Options) -> Parameters:
    """`options` is an empty message of the kind that the model takes."""
    read = Parameters(options)
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter {name[:40]!r} has no value")
        _set(read, name, getattr(parameter, kind))
    return read


def option_names(options: Options) -> list[str]:
    if isinstance(options, PooledOptions):
        return [each.name for each in fields(options)]
    names = options.DESCRIPTOR.fields_by_name
    return [name for name in names if name not in _OUTPUTS and name not in _UNAVAILABLE]


def _set(read: Parameters, name: str, value: Any) -> None:
    languages = _LANGUAGES if isinstance(read.options, pb.DecodingOptions) else ()
    streams = () if isinstance(read.options, PooledOptions) else ("stream",)
    if name in option_names(read.options):
        _set_option(read.options, name, value)
    elif name in languages:
        read.languages[name] = _expect(name, value, str, "a string")
    elif name == "timeout":
        microseconds = _expect(name, value, int, "a whole number of microseconds")
        if microseconds < 0:
            raise InvalidRequest(f"parameter 'timeout' is {microseconds}; it must be 0 (none) or more microseconds")
        read.queue_timeout = microseconds / 1e6 or None
    elif name == "priority":
        level = _expect(name, value, int, "a whole number")
        if not 0 <= level <= LOWEST_PRIORITY + 1:
            raise InvalidRequest(f"parameter 'priority' is {level}; it must be 1 to {LOWEST_PRIORITY + 1}, or 0")
        read.priority = level - 1 if level else None
    elif name in streams:
        read.stream = _expect(name, value, bool, "true or false")
    elif name == "triton_enable_empty_final_response":
        read.empty_final = _expect(name, value, bool, "true or false")
    elif name in _OUTPUTS and streams:
        raise InvalidRequest(f"parameter {name!r} is not known here; ask for the output {_OUTPUTS[name]!r} instead")
    elif name.startswith("sequence_"):
        raise InvalidRequest(f"parameter {name[:40]!r}: the models here keep no state between requests")
    else:
        known = ", ".join((*option_names(read.options), *languages, *streams, "timeout", "priority"))
        raise InvalidRequest(f"parameter {name[:40]!r} is not known; known are {known}")


def _set_option(options: Options, name: str, value: Any) -> None:
    if isinstance(options, PooledOptions):
        kinds: dict[str, tuple[type, str]] = {"top_k": (int, "a whole number"), "pooling": (str, "a string")}
        setattr(options, name, _expect(name, value, *kinds.get(name, (bool, "true or false"))))
        return
    option = options.DESCRIPTOR.fields_by_name[name]
    if name == "early_stopping":
        if not isinstance(value, bool | str) or value not in _EARLY_STOPPING:
            raise InvalidRequest("parameter 'early_stopping' must be true, false, or the string 'never'")
        options.early_stopping = _EARLY_STOPPING[value]
    elif name == "logit_bias":
        getattr(options, name).update(_biases(name, value))
    elif option.is_repeated:
        strings = option.cpp_type == option.CPPTYPE_STRING
        getattr(options, name).extend([_expect(name, value, str, "a string")] if strings else _ids(name, value))
    elif option.cpp_type == option.CPPTYPE_BOOL:
        setattr(options, name, _expect(name, value, bool, "true or false"))
    elif option.cpp_type == option.CPPTYPE_STRING:
        setattr(options, name, _expect(name, value, str, "a string"))
    elif option.cpp_type == option.CPPTYPE_FLOAT:
        setattr(options, name, float(_expect(name, value, (int, float), "a number")))
    else:
        whole = _expect(name, value, int, "a whole number")
        largest = _LARGEST["uint64" if option.cpp_type == option.CPPTYPE_UINT64 else "uint32"]
        if not 0 <= whole <= largest:
            raise InvalidRequest(f"parameter {name!r} is {whole}; it must be 0 to {largest}")
        setattr(options, name, whole)


def _expect(name: str, value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    # A bool is an int in Python, but not in the protocol.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(f"parameter {name!r} must be {what}")
    return value


def _ids(name: str, value: Any) -> list[int]:
    """A parameter holds no list, so ids are written with commas between them."""
    words = [word.strip() for word in _expect(name, value, str, f"a string of {_IDS}").split(",")]
    # The digits are counted first: Python reads no number of thousands of them.
    if not all(word.isdecimal() and len(word) <= _MOST_DIGITS and int(word) <= _LARGEST["uint32"] for word in words):
        raise InvalidRequest(f"parameter {name!r} must be a string of {_IDS}, each 0 to {_LARGEST['uint32']}")
    return [int(word) for word in words]


def _biases(name: str, value: Any) -> dict[int, float]:
    what = "a string like '17:-100,4:2.5': ids, and what is added to their logits"
    pairs = [pair.partition(":") for pair in _expect(name, value, str, what).split(",")]
    try:
        return {_ids(name, token)[0]: float(bias) for token, _, bias in pairs}
    except ValueError:
        raise InvalidRequest(f"parameter {name!r} must be {what}") from None
