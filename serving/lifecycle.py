"""Is the server loading, ready or draining, and how many calls are inside: one answer for all doors.

Ready means that it can answer somebody: it takes calls, and at least one model is served. A server whose last model was
unloaded still takes calls (each is told why, and a load brings it back), but nobody should be sent to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from beamline.serving.errors import ShuttingDown


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """Belongs to the event loop: none of it may be called from another thread."""

    def __init__(self, serves_a_model: Callable[[], bool] = lambda: True) -> None:
        self.phase = Phase.LOADING
        self._serves_a_model = serves_a_model
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY and self._serves_a_model()

    @property
    def describe(self) -> str:
        """In a word or two, for probes."""
        return self.phase.value if self.ready or self.phase is not Phase.READY else "no model is served"

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around every call that needs an engine. A call that is inside when the drain begins is finished."""
        if self.phase is not Phase.READY:
            raise ShuttingDown(f"this server is {self.phase} and takes no new work; try another one")
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no call is inside."""
        await self._idle.wait()
