"""A call's context whose messages somebody must take.

A client that stops reading stops the writer too, for as long as its connection stands: its model could not be unloaded,
and a server that drains would wait for it. So a message that is not taken within some seconds ends the call.
"""

from __future__ import annotations

import asyncio
from typing import Any

from beamline.serving.api.guard import slow_reader


class PatientContext:
    """As the context that it was made of, but for `write`."""

    def __init__(self, context: Any, seconds: float | None) -> None:
        self._context = context
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Raises `SlowReader` where the client does not take it."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._context.write(message)
        except TimeoutError:
            raise slow_reader(self._seconds) from None
