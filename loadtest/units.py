"""Durations and shares, as people write and read them. Inside, everything is in seconds."""

from __future__ import annotations

import math
import re

from loadtest.errors import LoadTestError

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?|\.[0-9]+"
_DURATION = re.compile(rf"({_NUMBER})\s*([a-zµ]*)")


def seconds(text: str) -> float:
    """`500ms`, `2s`, `1.5m`; a bare number is seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        raise LoadTestError(f"{text!r} is no duration; write 500ms, 2s or 1.5m")
    return float(match[1]) * _SECONDS[match[2]]


def duration(value: float | None) -> str:
    """Three digits and a unit that fits."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) >= 60:
        return f"{value / 60:.1f} min"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value * 1e6)} µs"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{_digits(value)}/s"


def share(value: float) -> str:
    return f"{100 * value:.{2 if value and value < 0.1 else 1}f} %"


def _digits(value: float) -> str:
    """Three of them; all, where there are more before the point."""
    magnitude = abs(value)
    return f"{value:.{2 if magnitude < 10 else 1 if magnitude < 100 else 0}f}"
