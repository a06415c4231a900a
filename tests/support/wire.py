"""A unary gRPC call without gRPC's own library, which keeps some of what a server sends to itself."""

from __future__ import annotations

import asyncio
import struct

import h2.config
import h2.connection
import h2.events


async def trailers_of(address: str, method: str, message: bytes) -> dict[str, bytes]:
    """All headers behind the messages, as they were sent: those that end in -bin are base64."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    settings = h2.config.H2Configuration(header_encoding=None)
    connection = h2.connection.H2Connection(settings)
    connection.initiate_connection()
    head = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address, "te": "trailers"}
    connection.send_headers(1, [*head.items(), ("content-type", "application/grpc")])
    connection.send_data(1, struct.pack(">BI", 0, len(message)) + message, end_stream=True)
    found: dict[str, bytes] = {}
    try:
        while True:
            writer.write(connection.data_to_send())
            data = await reader.read(65536)
            assert data, "the server has closed the connection"
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    found = {bytes(name).decode(): bytes(value) for name, value in event.headers or ()}
                if isinstance(event, h2.events.StreamEnded):
                    return found
    finally:
        writer.close()
