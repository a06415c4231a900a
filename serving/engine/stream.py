"""A call's sequences as they come: what the engine tells, handed to whoever reads, however slowly.

The engine's thread never waits: it only leaves things on the event loop. What a reader has not taken yet is kept, up to
a limit; beyond it the call is given up, and its slots are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from beamline.serving.engine.async_engine import Decoder, DecodingCall, Job
from beamline.serving.engine.request import Piece, Result
from beamline.serving.errors import SlowReader

Event = tuple[int, Piece | Result]  # of which job


class Stream:
    """Lives on the event loop. Iterate over `events()` inside `contextlib.aclosing`: leaving it frees the slots."""

    def __init__(
        self, engine: Decoder, jobs: Sequence[Job], deadline: float | None, max_in_flight: int, max_unread: int
    ) -> None:
        self._call = DecodingCall(engine, deadline, tell=self._tell)
        self._jobs = jobs
        self._max_in_flight = max_in_flight
        self._max_unread = max_unread  # tokens
        self._unread: list[Event] = []
        self._unread_tokens = 0
        self._overrun = False
        self._changed = asyncio.Event()

    def enough(self, job: int, index: int) -> None:
        """No more of one hypothesis is wanted."""
        self._call.enough(job, index)

    async def events(self) -> AsyncGenerator[list[Event]]:
        """All that has come since the last time, as soon as there is anything."""
        work = asyncio.create_task(self._call.run(self._jobs, self._max_in_flight))
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

    def _tell(self, job: int, news: Piece | Result) -> None:
        if self._overrun:
            return
        if isinstance(news, Piece):
            self._unread_tokens += len(news.tokens)
            if self._unread_tokens > self._max_unread:
                self._overrun = True
                self._unread.clear()
                self._call.abandon()  # now, and not when the reader comes back
        self._unread.append((job, news))
        self._changed.set()
