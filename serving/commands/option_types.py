"""What an option's value may be: each is argparse's `type`, and says what is allowed."""

from __future__ import annotations

import argparse
import sys

from beamline.serving.models.settings import MOST_SLOWDOWN


def _whole(text: str, lowest: int, highest: int | None = None) -> int:
    allowed = f"a whole number from {lowest} on" if highest is None else f"a whole number from {lowest} to {highest}"
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be {allowed}") from None
    if value < lowest or (highest is not None and value > highest):
        raise argparse.ArgumentTypeError(f"it is {value}; it must be {allowed}")
    return value


def _real(text: str, lowest: float, highest: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be {what}") from None
    if not lowest <= value <= highest:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be {what}")
    return value


def port(text: str) -> int:
    return _whole(text, 0, 65535)


def positive(text: str) -> int:
    return _whole(text, 1)


def none_or_more(text: str) -> int:
    return _whole(text, 0)


def host(text: str) -> str:
    name, colon, number = text.rpartition(":")
    if colon and number.isdigit() and ":" not in name:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be an address without a port: --host {name}")
    return text.strip("[]")


def slowdown(text: str) -> float:
    return _real(text, 1, MOST_SLOWDOWN, f"a number from 1 to {MOST_SLOWDOWN:g}")


def duration(text: str) -> float:
    return _real(text, 0, sys.float_info.max, "a number, 0 or more")


def limit(text: str) -> float | None:
    if text == "none":
        return None
    return _real(text, 0, sys.float_info.max, "a number of seconds, or none")


def interval(text: str) -> float:
    return _real(text, 0.05, sys.float_info.max, "a number of seconds, at least 0.05")
