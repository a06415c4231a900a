"""The phase of the server (loading, ready, leaving, draining) and the count of running calls, for all APIs.

Ready means that the server takes calls and serves at least one model. A server whose last model was unloaded still
takes calls, which fail with the reason, and may load a model again; but it reports that it is not ready, so that load
balancers send calls elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

from beamline.serving.errors import ShuttingDown

_RETRY_SECONDS = 1.0  # by then a load balancer has noticed, or a supervisor has started another process


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # health checks say no, calls are still answered: load balancers need time to notice
    DRAINING = "draining"
    FAILED = "failed"  # engines don't step any more: the process is about to end


_REFUSING = (Phase.DRAINING, Phase.FAILED)


class Lifecycle:
    """Not thread-safe: it belongs to the event loop."""

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
        """A server that failed stays failed until it ends: to be drained or stopped is no recovery."""
        if self._phase is not Phase.FAILED:
            self._phase = phase
        if self._phase in _REFUSING:
            for timeout in self._arriving:
                if not timeout.expired():
                    timeout.reschedule(0)  # in the past: it expires now

    @property
    def live(self) -> bool:
        return self.phase is not Phase.FAILED

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
        if self.phase not in (Phase.READY, Phase.LEAVING):
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
        """Around reading a call's body, which may never end. A drain or a failure cancels it at once with
        `ShuttingDown`: the call would be refused anyway."""
        if self.phase in _REFUSING:
            raise self._refusal()
        try:
            async with asyncio.timeout(None) as timeout:
                self._arriving.add(timeout)
                try:
                    yield
                finally:
                    self._arriving.discard(timeout)
        except TimeoutError:
            raise self._refusal() from None

    def _refusal(self) -> ShuttingDown:
        sentence = f"this server is {self.phase} and takes no new work; try another one"
        return ShuttingDown(sentence, retry_after=_RETRY_SECONDS)

    async def idle(self) -> None:
        """Returns when no call is running."""
        await self._idle.wait()
