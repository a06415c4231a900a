"""HTTP calls that arrive in half or in a wrong way, or whose client or server goes away meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx2 as httpx
import pytest

from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, eventually, running

ONE = {"inputs": [{"text": "a"}]}
BODY = json.dumps(ONE)
HALF = b"POST /v1/translate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
CHUNKED = b"POST /v1/translate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"


def whole(accept: str) -> bytes:
    head = f"POST /v1/translate HTTP/1.1\r\nhost: a\r\naccept: {accept}\r\ncontent-length: {len(BODY)}"
    return f"{head}\r\n\r\n{BODY}".encode()


@asynccontextmanager
async def sent(server: Server, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which this was sent, and no more will be."""
    assert server.http_address is not None
    host, _, port = server.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("begun", [HALF, CHUNKED], ids=["half", "chunked"])
async def test_who_hangs_up_within_a_body_is_counted_as_gone(begun: bytes) -> None:
    async with running(EngineDouble(), http_port=0) as server:
        async with sent(server, begun):
            await eventually(lambda: len(server.lifecycle._arriving) == 1)
        sample, call = server.metrics.registry.get_sample_value, {"method": "POST /v1/translate", "code": "CANCELLED"}
        await eventually(lambda: sample("beamline_calls_total", call) == 1)


async def test_who_hangs_up_before_the_first_event_is_not_decoded_for() -> None:
    engine = EngineDouble(held=True)
    async with running(engine, http_port=0) as server:
        async with sent(server, whole("text/event-stream")):
            await engine.until(lambda: len(engine.submitted) == 1)
        await engine.until(lambda: engine.cancelled == [engine.submitted[0].id])
        sample, call = server.metrics.registry.get_sample_value, {"method": "POST /v1/translate", "code": "CANCELLED"}
        await eventually(lambda: sample("beamline_calls_total", call) == 1)


@pytest.mark.parametrize("begun", [HALF, CHUNKED], ids=["half", "chunked"])
async def test_a_drain_does_not_wait_for_the_rest_of_a_body(begun: bytes) -> None:
    """Nor does it count as cut short: such a call was never taken in, and is told to go elsewhere."""
    async with running(EngineDouble(), http_port=0) as server, sent(server, begun) as reader:
        await eventually(lambda: len(server.lifecycle._arriving) == 1)
        assert await server.drain()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"this server is draining and takes no new work" in answer
        sample = server.metrics.registry.get_sample_value
        assert sample("beamline_calls_total", {"method": "POST /v1/translate", "code": "UNAVAILABLE"}) == 1
        assert sample("beamline_refused_total", {"reason": "shutting_down"}) == 1


async def test_a_body_that_begins_during_a_drain_is_not_read() -> None:
    engine = EngineDouble(held=True)
    async with (
        running(engine, http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=60) as client,
    ):
        inside = asyncio.ensure_future(client.post("/v1/translate", json=ONE))
        await engine.until(lambda: len(engine.submitted) == 1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)  # one turn of the loop, so that the drain has begun
        async with sent(server, HALF) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        assert not draining.done()
        engine.release()
        assert await draining
        assert (await inside).status_code == 200


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_drain_that_gives_up_cuts_off_what_runs(accept: str) -> None:
    engine = EngineDouble(held=True)
    async with running(engine, http_port=0, drain_seconds=0.05) as server, sent(server, whole(accept)) as reader:
        await engine.until(lambda: len(engine.submitted) == 1)
        assert not await server.drain()
        await server.stop()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        sample = server.metrics.registry.get_sample_value
        assert sample("beamline_calls_total", {"method": "POST /v1/translate", "code": "CANCELLED"}) == 1
    assert engine.cancelled == [engine.submitted[0].id]


async def test_a_body_of_two_lengths_is_refused_and_its_connection_closed() -> None:
    request = (
        f"POST /v1/translate HTTP/1.1\r\nhost: a\r\ncontent-length: {len(BODY)}\r\n"
        f"transfer-encoding: chunked\r\n\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
    )
    async with running(EngineDouble(), http_port=0) as server, sent(server, request.encode()) as reader:
        received = await reader.read()  # to the end: it is closed
        refused = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "invalid"})
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"both Content-Length and Transfer-Encoding" in received
    assert refused == 1


async def test_a_body_that_does_not_come_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beamline.serving.api.http.body._BODY_SECONDS", 0.01)
    async with running(EngineDouble(), http_port=0) as server, sent(server, HALF) as reader:
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        refused = server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "too_slow"})
    assert refused == 1
