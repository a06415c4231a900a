"""The calls of a list, on an event loop or from threads: several at a time, and where one fails, the others are
cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Call = TypeVar("Call")


async def run_all(run: Callable[[Call], Awaitable[None]], calls: Iterable[Call], at_once: int) -> None:
    """Of several failures the first item's is raised."""
    calls = list(calls)
    if len(calls) == 1:
        return await run(calls[0])
    rest = iter(calls)

    async def work() -> None:
        for call in rest:
            await run(call)

    tasks = [asyncio.create_task(work()) for _ in range(max(1, min(len(calls), at_once)))] if calls else []
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
            if failures:
                raise min(failures, key=place)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_in_threads(
    run: Callable[[Call], None], calls: Iterable[Call], at_once: int, cancel: Callable[[], None]
) -> None:
    """The same from threads of its own, for which an interpreter that ends does not wait. `cancel` ends the calls that
    are under way. Returns when the threads have ended."""
    rest, lock = iter(calls), threading.Lock()
    failures: list[BaseException] = []

    def take() -> Call | None:
        with lock:
            return None if failures else next(rest, None)

    def fail(error: BaseException) -> None:
        with lock:
            failures.append(error)
        cancel()

    def work() -> None:
        while (call := take()) is not None:
            try:
                run(call)
            except BaseException as error:
                fail(error)

    threads = [threading.Thread(target=work, name="beamline-client", daemon=True) for _ in range(at_once)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        fail(error)
        raise
    if failures:
        raise min(failures, key=place)


def place(error: BaseException) -> float:
    """Of the item at fault in its list."""
    return float(getattr(error, "index", float("inf")))
