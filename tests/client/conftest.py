from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.client.callers import AsyncCaller, Caller, SyncCaller

MakeCaller = Callable[..., Caller]


@pytest.fixture(params=[SyncCaller, AsyncCaller], ids=["Client", "AsyncClient"])
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[MakeCaller]:
    """Makes clients of both kinds, and closes them."""
    made: list[Caller] = []

    def make(*arguments: Any, **options: Any) -> Caller:
        made.append(request.param(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()
