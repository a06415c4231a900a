"""How many calls one client may have inside at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from beamline.serving.errors import Overloaded


class ClientLimit:
    """Belongs to the event loop. Forgets clients that have no call inside, so strangers can't make it grow."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._inside: Counter[str] = Counter()

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        if self._most is not None and self._inside[client] >= self._most:
            raise Overloaded(
                f"you have {self._most} calls running here, the most that one client may have: wait for an answer"
            )
        self._inside[client] += 1
        try:
            yield
        finally:
            self._inside[client] -= 1
            if not self._inside[client]:
                del self._inside[client]
