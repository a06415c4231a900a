"""The gRPC server: built, bound, started, drained."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from beamline.serving.api.grpc import services
from beamline.serving.api.grpc.health import Health
from beamline.serving.api.grpc.interceptor import CheckSize, GuardInterceptor
from beamline.serving.api.grpc.late_calls import LateCalls
from beamline.serving.api.guard import Guard
from beamline.serving.api.inference import Inference
from beamline.serving.api.open_inference.methods import OpenInference
from beamline.serving.errors import BeamlineError
from beamline.serving.models.manager import ModelManager
from beamline.serving.security.tls import ServerTls

_STOP_GRACE_SECONDS = 1.0  # for responses that are being sent; the calls themselves are over by then

# Calls that have arrived, but that the event loop has not accepted yet, wait inside gRPC's own library. By default it
# drops more and more of them beyond 1,000, all beyond 3,000, and those that it has kept for 30 seconds: as CANCELLED,
# without a hint when to try again, and before any code of ours could count them. The queues that refuse calls
# are the engines'; what waits here has yet to reach them, and the limit only bounds memory (13 KiB each).
_MAX_PENDING = 100_000
_PENDING_SECONDS = 24 * 3600  # the wait ends with the client's own deadline


# Connections beyond the limit are closed at once. Those that don't become HTTP/2 in time are closed, and those that
# have had no call for long are asked to go; a client with another call connects anew, unseen by its caller.
_HANDSHAKE_MS = 10_000
_IDLE_MS = 300_000
_PING_TIMEOUT_MS = 20_000
_LEAST_PING_INTERVAL_MS = 10_000


def _connection_age(seconds: float) -> list[tuple[str, int]]:
    """Connections are closed after so long, and calls on them have as long again to end: clients that balance by name
    connect anew, and so find servers that came later."""
    return [
        ("grpc.max_connection_age_ms", int(1000 * seconds)),
        ("grpc.max_connection_age_grace_ms", int(1000 * seconds)),
    ]


def _keepalive(seconds: float) -> list[tuple[str, int]]:
    """A connection on which nothing has come for so long is asked if anybody is there. grpcio ends it by the second
    option; the one that is called keepalive_timeout does not end it before a minute is over (seen with grpcio 1.85)."""
    milliseconds = int(1000 * seconds)
    return [
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", min(milliseconds, _PING_TIMEOUT_MS)),
        # Clients may ask the same of us, also between calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
    ]


class GrpcServer:
    """Bound at construction, so that a port in use is known before any model is loaded; a client that
    connects early waits until `start`."""

    def __init__(
        self,
        host: str,
        port: int,
        max_message_bytes: int,
        guard: Guard,
        tls: ServerTls | None,
        max_connections: int,
        keepalive_seconds: float,
        check_size: CheckSize,
        max_connection_seconds: float | None = None,
        write_seconds: float | None = None,
    ) -> None:
        self._guard = guard
        self._late_calls = LateCalls()
        self._server: Any = grpc.aio.server(
            interceptors=[GuardInterceptor(guard, self._late_calls, check_size, write_seconds)],
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # two servers on one port would share its calls by chance
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server.max_pending_requests", _MAX_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
                ("grpc.server_max_unrequested_time_in_server", _PENDING_SECONDS),
                *_keepalive(keepalive_seconds),
                *([] if max_connection_seconds is None else _connection_age(max_connection_seconds)),
            ],
        )
        self._health = Health()
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = (
                self._server.add_insecure_port(address)
                if tls is None
                else self._server.add_secure_port(address, tls.grpc_credentials())
            )
        except RuntimeError as error:
            raise BeamlineError(
                f"the gRPC server can't listen on {address}: another process has the port, or the address is not this "
                "machine's: choose another --grpc-port (0: any free one) or --host"
            ) from error

    async def start(self, inference: Inference, open_inference: OpenInference, manager: ModelManager) -> None:
        services.add_to(self._server, inference, open_inference, self._guard, self._health)
        await self._health.begin(manager)
        await self._server.start()

    async def report_not_serving(self) -> None:
        """To health checks, so that load balancers send new calls elsewhere."""
        await self._health.end()

    async def stop(self, at_once: bool) -> None:
        if at_once:
            await self._server.stop(0)
            return
        await self._late_calls.hold()
        stopping = asyncio.ensure_future(self._server.stop(_STOP_GRACE_SECONDS))
        await self._late_calls.release()
        await stopping
