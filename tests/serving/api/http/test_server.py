from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from beamline.serving.api.http.server import HttpServer

LARGE = 64 * 1024 * 1024  # bytes: more than the buffers of both sides hold


async def large(request: Request) -> Response:
    return Response(bytes(LARGE))


async def test_finish_waits_for_a_slow_reader_and_stop_does_not() -> None:
    server = HttpServer("127.0.0.1", 0)
    await server.start(Starlette(routes=[Route("/", large)]))
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    for reader, writer in connections:
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    finishing = asyncio.ensure_future(server.finish())
    (slow, slow_writer), (never, never_writer) = connections
    assert len(await slow.read()) > LARGE
    assert not finishing.done()
    await server.stop()
    await finishing
    received = 0
    with suppress(ConnectionResetError):
        received = len(await never.read())
    assert received < LARGE
    for writer in (slow_writer, never_writer):
        writer.close()
