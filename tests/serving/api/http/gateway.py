"""A server around an engine's double, and a client of its JSON gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, running

ONE = {"inputs": [{"text": "a"}]}


@asynccontextmanager
async def gateway(
    engine: EngineDouble | None = None, **changes: Any
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    async with (
        running(engine or EngineDouble(), http_port=0, **changes) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        yield server, client
