"""The limit of concurrent calls per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from beamline.serving.errors import Overloaded


class ClientLimit:
    """Not thread-safe: it belongs to the event loop. Clients without a running call are forgotten, so that its memory
    is bounded."""

    def __init__(self, max_calls: int | None) -> None:
        self._max_calls = max_calls
        self._running: Counter[str] = Counter()

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        if self._max_calls is not None and self._running[client] >= self._max_calls:
            raise Overloaded(
                f"you have {self._max_calls} calls running here, the most that one client may have: wait for an answer"
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
