"""The phase of the server (loading, ready, draining) and the count of running calls, for all APIs.

Ready means that the server takes calls and serves at least one model. A server whose last model was unloaded still
takes calls, which fail with the reason, and may load a model again; but it reports that it is not ready, so that load
balancers send calls elsewhere.
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
    """Not thread-safe: it belongs to the event loop."""

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
        """The phase in a word or two, for health checks."""
        return self.phase.value if self.ready or self.phase is not Phase.READY else "no model is served"

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around every call that needs an engine. Raises `ShuttingDown` if the server takes no calls; a call that runs
        when the drain begins is finished."""
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
        """Returns when no call is running."""
        await self._idle.wait()
