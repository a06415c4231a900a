"""Where text is worked on: a small request on the event loop, a large one beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from google.protobuf.message import Message

Answer = TypeVar("Answer")

# Bytes of a request that are tokenised in about a millisecond; more would keep the event loop from others.
_SMALL = 2 * 1024


async def run_where_it_fits(workers: Executor, request: Message, work: Callable[[], Answer]) -> Answer:
    if request.ByteSize() > _SMALL:
        return await asyncio.get_running_loop().run_in_executor(workers, work)
    return work()
