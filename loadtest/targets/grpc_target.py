"""What every protocol over gRPC shares: channels, TLS, the token, and why a connection failed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

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
    if connection.tls is None:
        return grpc.aio.insecure_channel(connection.target, options=options)
    if connection.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", connection.tls.server_name))
    tls = connection.tls
    credentials = grpc.ssl_channel_credentials(_content(tls.roots), _content(tls.key), _content(tls.certificate))
    return grpc.aio.secure_channel(connection.target, credentials, options=options)


def _metadata(connection: Connection) -> tuple[tuple[str, str], ...]:
    token = token_of(connection.token_file)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def token_of(path: Path | None) -> str | None:
    content = _content(path)
    if content is None:
        return None
    token = content.decode("utf-8", "replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise LoadTestError(f"{path} holds no token")
    return token


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise LoadTestError(f"{path} can't be read: {error.strerror}") from error
