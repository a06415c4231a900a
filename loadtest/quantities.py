"""Durations, shares and rates: read from what people type, and written for them. Inside, everything is in seconds."""

from __future__ import annotations

import math
import re

from beamline.loadtest.errors import LoadTestError

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?|\.[0-9]+"
_DURATION = re.compile(rf"({_NUMBER})\s*([a-zµ]*)")
_PERCENT = re.compile(rf"({_NUMBER})\s*(%?)")
_PER_SECOND = re.compile(rf"({_NUMBER})\s*(?:/\s*s)?")


def parse_duration(text: str) -> float:
    """`500ms`, `2s`, `1.5m`; a bare number only if it is 0, since 500 may mean milliseconds or seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is not None and match[2] in _SECONDS:
        return float(match[1]) * _SECONDS[match[2]]
    if match is not None and not match[2]:
        if float(match[1]) == 0:
            return 0.0
        raise LoadTestError(f"{text!r} needs a unit (us, ms, s, m or h); write {match[1]}ms or {match[1]}s")
    raise LoadTestError(f"{text!r} is no duration; write 500ms, 2s or 1.5m")


def parse_share(text: str) -> float:
    """`1%` is 0.01; a bare number only if it is 0, since 1 may mean 1 % or all."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise LoadTestError(f"{text!r} is no share; write 0% to 100%")
    if not match[2] and float(match[1]) != 0:
        raise LoadTestError(f"{text!r} needs a unit; write {match[1]}%")
    return float(match[1]) / 100


def parse_rate(text: str) -> float:
    """`5` or `5/s`: rates have only one unit, so it may be left out."""
    match = _PER_SECOND.fullmatch(text.strip())
    if match is None:
        raise LoadTestError(f"{text!r} is no rate; write 5 or 5/s")
    return float(match[1])


def format_duration(value: float | None) -> str:
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


def format_rate(value: float | None) -> str:
    return "-" if value is None else f"{_digits(value)}/s"


def format_share(value: float) -> str:
    return f"{100 * value:.{2 if value and value < 0.1 else 1}f} %"


def _digits(value: float) -> str:
    """Three significant digits; all digits before the point where there are more."""
    magnitude = abs(value)
    return f"{value:.{2 if magnitude < 10 else 1 if magnitude < 100 else 0}f}"
