"""A call's outputs as they come, for a reader that may be slow.

The engine's thread never waits: it only leaves outputs on the event loop. What a reader has not taken yet is kept, up
to a limit; beyond it the call is given up, and its slots are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from beamline.serving.engine.async_engine import AnyEngine, RequestGroup
from beamline.serving.engine.outputs import Output, Piece
from beamline.serving.engine.request import Request
from beamline.serving.errors import SlowReader

Event = tuple[int, Output]  # of which request


class Stream:
    """Lives on the event loop. Iterate over `events()` inside `contextlib.aclosing`: leaving it frees the slots."""

    def __init__(
        self,
        engine: AnyEngine,
        requests: Sequence[Request],
        deadline: float | None,
        max_in_flight: int,
        max_unread: int,
    ) -> None:
        self._group = RequestGroup(engine, deadline, self._take)
        self._requests = requests
        self._max_in_flight = max_in_flight
        self._max_unread = max_unread  # tokens
        self._unread: list[Event] = []
        self._unread_tokens = 0
        self._overrun = False
        self._changed = asyncio.Event()

    def stop(self, request: int, index: int) -> None:
        """No more is wanted of one hypothesis."""
        self._group.stop(request, index)

    async def events(self) -> AsyncGenerator[list[Event]]:
        """All that has come since the last time, as soon as there is anything."""
        work = asyncio.create_task(self._group.run(self._requests, self._max_in_flight))
        work.add_done_callback(lambda task: self._changed.set())
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._overrun:
                    raise SlowReader(
                        f"more than {self._max_unread} tokens were waiting to be read; read faster, or ask for fewer"
                    )
                over = work.done()  # before the events are taken: the last of them may come with the end
                events, self._unread, self._unread_tokens = self._unread, [], 0
                if events:
                    yield events
                if over:
                    work.result()
                    return
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    def _take(self, request: int, output: Output) -> None:
        if self._overrun:
            return
        if isinstance(output, Piece):
            self._unread_tokens += len(output.tokens)
            if self._unread_tokens > self._max_unread:
                self._overrun = True
                self._unread.clear()
                self._group.abandon()  # now, and not when the reader comes back
        self._unread.append((request, output))
        self._changed.set()
