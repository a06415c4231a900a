"""A name with several addresses: all of them are asked."""

from __future__ import annotations

import asyncio

from beamline import AsyncClient, Client
from tests.serving.doubles import EngineDouble, running


async def test_calls_go_to_all_servers_in_turn() -> None:
    engines = [EngineDouble(), EngineDouble()]
    async with running(engines[0]) as one, running(engines[1]) as other:
        target = f"ipv4:{one.grpc_address},{other.grpc_address}"
        async with AsyncClient(target) as client:
            while not all(engine.submitted for engine in engines):  # until both are connected
                await client.translate("a")
            before = [len(engine.submitted) for engine in engines]
            for _ in range(10):
                await client.translate("a")
        assert [len(engine.submitted) for engine in engines] == [count + 5 for count in before]


async def test_one_that_is_away_is_left_out() -> None:
    engine = EngineDouble()
    async with running(engine) as server:
        with Client(f"ipv4:{server.grpc_address},127.0.0.1:1", retries=0) as client:
            for _ in range(5):
                assert (await asyncio.to_thread(client.translate, "a")).text == "a"
    assert len(engine.submitted) == 5
