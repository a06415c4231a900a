"""Pydantic's errors as sentences of ours: the key, what it is, and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

_MAX_VALUE = 40  # characters
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text, in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "timezone_aware": "a time with its zone, as 2027-01-01T00:00:00Z",
    "datetime_type": "a time, as 2027-01-01T00:00:00Z",
    "datetime_parsing": "a time, as 2027-01-01T00:00:00Z",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
    "too_short": ("of a length of at least", "min_length"),
    "too_long": ("of a length of at most", "max_length"),
    "string_too_short": ("of a length of at least", "min_length"),
    "string_too_long": ("of a length of at most", "max_length"),
    "string_pattern_mismatch": ("text of the form", "pattern"),
    "literal_error": ("", "expected"),
    "enum": ("", "expected"),
}


def sentence_of(error: ValidationError, root: str = "it") -> str:
    """`root` is what the whole is called, where no key is wrong but all of it."""
    places: dict[str, tuple[Any, list[str]]] = {}
    for problem in error.errors():
        place = _place(problem["loc"]) or root
        _, allowed = places.setdefault(place, (problem["input"], []))
        allowed.append(_allowed(problem))
    return "; ".join(_one(place, value, allowed) for place, (value, allowed) in places.items())


def _one(place: str, value: Any, allowed: list[str]) -> str:
    if "" in allowed:
        return f"{place} is missing" if isinstance(value, Mapping) else f"{place} is not known here"
    own = [each for each in allowed if each.endswith("!")]
    if own:  # a sentence of a check of ours
        return f"{place}: {own[0][:-1]}"
    shown = "a table" if isinstance(value, Mapping) else repr(value)[:_MAX_VALUE]
    return f"{place} is {shown}; it must be {' or '.join(dict.fromkeys(allowed))}"


def _allowed(problem: Mapping[str, Any]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("missing", "extra_forbidden"):
        return ""
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        value = context.get(bound, "")
        return f"{words} {value:g}".strip() if isinstance(value, int | float) else f"{words} {value}".strip()
    return f"{problem['msg'].removeprefix('Value error, ')}!"


def _place(location: tuple[int | str, ...]) -> str:
    """Without the names of a union's members, which mean nothing to a reader."""
    return ".".join(str(part) for part in location if "[" not in str(part))
