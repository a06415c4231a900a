"""Graphs that are opened when they are first needed, such as that of scores: between two steps, on the thread that all
models of a GPU share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from beamline.serving.errors import OutOfMemory

_AGAIN_AFTER = 60.0  # seconds
_TRIES = 2  # before that: the second one when all has been given back that could be


class _Refused(NamedTuple):
    until: float
    why: str
    times: int


class LateGraphs:
    """Where there is no memory for one, that is not tried again for each request: it reads all weights, for seconds, in
    which nobody decodes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[str, _Refused] = {}

    @contextmanager
    def opening(self, graph: str) -> Iterator[None]:
        refused = self._refused.get(graph)
        if refused is not None and self._clock() >= refused.until:
            refused = None
        if refused is not None and refused.times >= _TRIES:
            raise OutOfMemory(refused.why)
        try:
            yield
        except OutOfMemory as error:
            times = 1 if refused is None else refused.times + 1
            self._refused[graph] = _Refused(self._clock() + _AGAIN_AFTER, str(error), times)
            raise
