"""Callbacks that don't keep whom they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec
from weakref import WeakMethod

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """For what an engine gives to its own parts: otherwise the two would keep each other, and the memory of an unloaded
    model would wait for a garbage collection."""
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        target = reference()
        assert target is not None, "a part outlived its engine"
        target(*args, **kwargs)

    return call
