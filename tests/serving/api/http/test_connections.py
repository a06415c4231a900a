"""Who opens connections and sends nothing costs nobody anything."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from beamline.serving.api.descriptors import share_descriptors
from beamline.serving.api.http.connections import ConnectionLimits
from beamline.serving.api.http.server import HttpServer
from tests.serving.doubles import eventually

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Running:
    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.hold = asyncio.Event()
        self.hold.set()
        self.port = 0
        self.at_work = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def answer(self, request: Request) -> Response:
        self.at_work += 1
        await self.hold.wait()
        return PlainTextResponse("hello")

    async def connect(self, data: bytes = b"", tls: ssl.SSLContext | None = None) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        self._writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def running(limits: ConnectionLimits, tls: Any = None) -> AsyncIterator[Running]:
    state = Running()
    server = HttpServer("127.0.0.1", 0, tls, limits, lambda reason: state.refused.update([reason]))
    state.port = server.port
    await server.start(Starlette(routes=[Route("/", state.answer)]))
    try:
        yield state
    finally:
        state.close()
        await server.stop()


async def ended(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def test_those_that_send_nothing_make_place_for_those_that_do() -> None:
    async with running(ConnectionLimits(total=3)) as server:
        silent = [await server.connect(b"GET /") for _ in range(10)]
        for _ in range(5):
            assert (await (await server.connect(GET)).readline()).startswith(b"HTTP/1.1 200 ")
        for reader in silent:
            assert await ended(reader) == b""
    # All that were too many: those ten, and two of five that had their answers and were idle.
    assert server.refused == {"idle_connection": 12}


async def test_who_is_answered_is_not_cut_off_for_newcomers() -> None:
    async with running(ConnectionLimits(total=2)) as server:
        server.hold.clear()
        answered = [await server.connect(GET) for _ in range(2)]
        await eventually(lambda: server.at_work == 2)
        assert (await ended(await server.connect(GET))).startswith(b"HTTP/1.1 503 ")
        server.hold.set()
        for reader in answered:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert server.refused == {"connections": 1}


async def test_a_head_has_a_limit_of_time() -> None:
    async with running(ConnectionLimits(total=10, head_seconds=0.05)) as server:
        for data in (b"", b"GET / HTTP/1.1\r\nhost:"):
            assert (await ended(await server.connect(data))).startswith(b"HTTP/1.1 408 ")
        assert server.refused == {"too_slow": 2}
        server.hold.clear()
        slow_answer = await server.connect(GET)  # the limit is the head's, and not the answer's
        assert (await ended(await server.connect())).startswith(b"HTTP/1.1 408 ")
        server.hold.set()
        assert (await slow_answer.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_second_head_has_the_same_limit() -> None:
    async with running(ConnectionLimits(total=10, head_seconds=0.05)) as server:
        received = await ended(await server.connect(GET + b"GET / HTTP/1.1\r\n"))
        assert received.index(b"HTTP/1.1 200 ") < received.index(b"HTTP/1.1 408 ")


async def test_an_address_can_have_a_limit_of_its_own() -> None:
    async with running(ConnectionLimits(total=10, per_address=2)) as server:
        kept = [await server.connect() for _ in range(2)]
        assert (await ended(await server.connect())).startswith(b"HTTP/1.1 503 ")
        assert server.refused == {"connections": 1}
        assert not any(reader.at_eof() for reader in kept)


async def test_a_handshake_has_a_limit_of_time_and_counts(tmp_path: Any) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    class Tls:
        def http_context(self) -> ssl.SSLContext:
            return context

    async with running(ConnectionLimits(total=2, head_seconds=30), Tls()) as server:
        silent = [await server.connect() for _ in range(4)]
        assert (await (await server.connect(GET, trusting)).readline()).startswith(b"HTTP/1.1 200 ")
        assert [await ended(reader) for reader in silent[:3]] == [b""] * 3
    async with running(ConnectionLimits(total=2, head_seconds=0.05), Tls()) as server:
        assert await ended(await server.connect()) == b""


def test_every_port_has_descriptors_of_its_own() -> None:
    shares = share_descriptors()
    assert min(shares.grpc, shares.gateway, shares.operators) >= 8
    assert share_descriptors(maximum=9).grpc == share_descriptors(maximum=9).gateway == 9
