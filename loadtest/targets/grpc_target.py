"""What every protocol over gRPC shares: channels, TLS, the token, and why a connection failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from beamline._channel import Connection as ClientConnection
from beamline._channel import read_token
from beamline.errors import BeamlineError
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.targets.target import Connection

_HEALTH = "/grpc.health.v1.Health/Check"  # every gRPC server says something to it, if only UNIMPLEMENTED


class GrpcTarget:
    """The base of every target that is called by gRPC."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._metadata = _metadata(connection)
        self._channels = [_channel(connection) for _ in range(connection.channels)]

    async def connect(self) -> None:
        ends = time.monotonic() + self._connection.connect_timeout
        for channel in self._channels:
            try:
                await asyncio.wait_for(channel.channel_ready(), max(ends - time.monotonic(), 0.01))
            except TimeoutError:
                raise LoadTestError(await self._why_not(channel)) from None

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _why_not(self, channel: Any) -> str:
        """A call says why there is no connection; waiting for one does not."""
        target, patience = self._connection.target, self._connection.connect_timeout
        trying = channel.get_state() is grpc.ChannelConnectivity.CONNECTING
        try:
            await channel.unary_unary(_HEALTH)(b"", timeout=1.0)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not trying:
                return f"the server at {target} is not available: {error.details()}"
        return (
            f"the server at {target} accepts connections but did not answer for {patience:g} s: "
            f"it hangs, or does not speak gRPC{'' if self._connection.tls else ' without TLS'}"
        )


def _channel(connection: Connection) -> grpc.aio.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),  # or all channels of a process would share one connection
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_retries", 0),  # a retry would hide a failure, and its time
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 1000),  # a server that comes back is soon seen again
    ]
    tls = connection.tls
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    with _as_ours():
        return _client_connection(connection).aio_channel(tuple(options))


def _metadata(connection: Connection) -> tuple[tuple[str, str], ...]:
    with _as_ours():
        return tuple(_client_connection(connection).metadata())


def token_of(path: Path | None) -> str | None:
    with _as_ours():
        return None if path is None else read_token(path)


def _client_connection(connection: Connection) -> ClientConnection:
    """TLS and token are those of the clients."""
    tls, token = connection.tls, token_of(connection.token_file)
    if tls is None:
        return ClientConnection(connection.target, token)
    return ClientConnection(connection.target, token, tls.roots or True, tls.certificate, tls.key)


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except BeamlineError as error:
        raise LoadTestError(str(error)) from error
