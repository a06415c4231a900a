"""Is the server loading, ready or draining, and how many calls are inside: one answer for all doors.

Ready means that it can answer somebody: it takes calls, and at least one model is served. A server whose last model was
unloaded still takes calls (each is told why, and a load brings it back), but nobody should be sent to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

from beamline.serving.errors import ShuttingDown


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """Belongs to the event loop: none of it may be called from another thread."""

    def __init__(self, serves_a_model: Callable[[], bool] = lambda: True) -> None:
        self._phase = Phase.LOADING
        self._serves_a_model = serves_a_model
        self._arriving: set[asyncio.Timeout] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        if phase is Phase.DRAINING:
            for patience in self._arriving:
                patience.reschedule(0)  # long ago: that is, now

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
            raise self._refusal()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Around what comes before a call, such as reading its body, which may never end. A drain gives it up at once:
        the call would be refused anyway."""
        if self.phase is Phase.DRAINING:
            raise self._refusal()
        try:
            async with asyncio.timeout(None) as patience:
                self._arriving.add(patience)
                try:
                    yield
                finally:
                    self._arriving.discard(patience)
        except TimeoutError:
            raise self._refusal() from None

    def _refusal(self) -> ShuttingDown:
        return ShuttingDown(f"this server is {self.phase} and takes no new work; try another one")

    async def idle(self) -> None:
        """Returns when no call is inside."""
        await self._idle.wait()
