"""An event loop with timers finer than a millisecond, and a measure of how late it runs.

asyncio's own rounds every timer up to the next millisecond, since `epoll_wait` counts in milliseconds. Half a
millisecond on every request would be the tool's own latency, and would count as the server's.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time

_TICK = 0.02


class PreciseSelector(selectors.EpollSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            # An epoll descriptor is itself readable when one of its own is; select() counts in microseconds.
            select.select([self], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def precise_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(PreciseSelector())


class LoopLag:
    """How late the event loop runs what is due, measured by a timer."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            self.lags.append(time.monotonic() - due)
