"""How a request reaches a server: `Target` is all that the load tester knows of a protocol."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.methods import METHODS
from beamline.loadtest.reply import Reply
from beamline.loadtest.workload import Item, Options

_HEALTH = "/grpc.health.v1.Health/Check"  # every gRPC server says something to it, if only UNIMPLEMENTED


@dataclass(frozen=True, slots=True)
class Tls:
    roots: Path | None = None  # None: the system's
    certificate: Path | None = None  # the client's own, for servers that ask
    key: Path | None = None
    server_name: str | None = None  # where the certificate names another host than the target


@dataclass(frozen=True, slots=True)
class Connection:
    """Where and how; small, since every process gets it."""

    target: str
    channels: int = 1  # TCP connections of each process
    deadline: float = 30.0
    connect_timeout: float = 10.0
    tls: Tls | None = None
    token_file: Path | None = None
    protocol: str = "beamline.v1"
    method: str = "translate"  # of beamline.v1: one of METHODS
    stream: bool = False  # of open-inference: by ModelStreamInfer
    input_name: str | None = None  # of open-inference: the tensor for the text; None: the model's only one


class Target(Protocol):
    """A server under test. A second protocol is a second class."""

    async def connect(self) -> None:
        """Returns when every connection stands, so that setting them up is not measured. Raises `LoadTestError` with
        the reason if they don't in time."""
        ...

    async def send(self, item: Item) -> Reply:
        """Never raises: a failure is a reply too."""
        ...

    async def close(self) -> None: ...


class GrpcTarget:
    """What every protocol over gRPC shares: its connections."""

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


class BeamlineTarget(GrpcTarget):
    """`beamline.v1`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._method = METHODS[connection.method]
        self._calls = cycle([self._method.open(channel) for channel in self._channels])
        self._options: dict[Options, Any] = {}  # parsed once, not for every request

    async def send(self, item: Item) -> Reply:
        try:
            call = next(self._calls)(self._request(item), timeout=self._connection.deadline, metadata=self._metadata)
            return await self._method.send(call)
        except grpc.aio.AioRpcError as error:
            return Reply(error.code().value[0], error.details() or "")

    def _request(self, item: Item) -> Any:
        options = self._options.get(item.options)
        if options is None:
            options = self._options[item.options] = self._method.options(item.options)
        return self._method.request(item, options)


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
