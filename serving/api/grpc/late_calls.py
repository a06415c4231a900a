"""Calls that come while the server ends.

From the moment that gRPC's library is told to end, it drops calls that have not reached us yet as CANCELLED, without a
hint when to try again, and uncounted. A client that calls again as soon as it is refused would always lose one call
that way. So the last refusals are held back until the library has told all clients to go (GOAWAY): a client that reads
its refusal then knows already that this connection is not to be used again.
"""

from __future__ import annotations

import asyncio
import time

_QUIET_SECONDS = 0.1  # without another call: whoever calls in a loop waits for us now
_MAX_SECONDS = 1.0
_GOAWAY_SECONDS = 0.05  # for the library to send it, on threads of its own


class LateCalls:
    def __init__(self) -> None:
        self._released = asyncio.Event()
        self._released.set()
        self._last: float | None = None

    async def before_refusal(self) -> None:
        self._last = time.monotonic()
        await self._released.wait()

    async def hold(self) -> None:
        """Returns when no more calls come, or few enough; immediately where none has come."""
        if self._last is None:
            return
        self._released.clear()
        self._last = now = time.monotonic()
        ends = now + _MAX_SECONDS
        while (until := min(ends, self._last + _QUIET_SECONDS)) > now:
            await asyncio.sleep(until - now)
            now = time.monotonic()

    async def release(self) -> None:
        """Behind the order to end."""
        if not self._released.is_set():
            await asyncio.sleep(_GOAWAY_SECONDS)
            self._released.set()
