"""What both clients are: a connection, and what is tried again, how often and when."""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from beamline._calls.arguments import names_what_it_knows
from beamline._calls.operation import Settings
from beamline._calls.requests import checked_timeout
from beamline._channel import Connection, target_of
from beamline._failures import Attempts, failure_of
from beamline.errors import BeamlineError, Cancelled, InvalidRequest

CLOSED = "this client is closed"


class Connected:
    @names_what_it_knows
    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        tls: bool | str | Path | None = None,
        client_cert: str | Path | None = None,
        client_key: str | Path | None = None,
        timeout: float | None = None,
        retries: int = 5,
        in_flight: int = 64,
    ) -> None:
        """Connects when it is first used.

        target: HOST:PORT of the gRPC port; where it is left out, the environment's BEAMLINE_TARGET,
            else 127.0.0.1:8001.
        token: what `beamline token` printed.
        tls: True trusts the public authorities, a path is a PEM file of the authorities to trust.
        client_cert, client_key: PEM files, for servers that want to see a certificate.
        timeout: seconds that a method may take, repeated attempts included, unless its own `timeout` says otherwise.
        retries: how often a call is tried again that the server had no capacity for, or that did not reach it; within
            the timeout, and never after a stream's first piece. With a timeout, a call that does not reach a server is
            tried again until it is over (0: never).
        in_flight: how many items of a list are with the server at once.
        """
        if timeout is not None:
            timeout = checked_timeout(timeout)
        if retries < 0 or in_flight < 1:
            raise InvalidRequest(f"retries is {retries} and in_flight {in_flight}; they must be at least 0 and 1")
        self._connection = Connection(target_of(target), token, tls, client_cert, client_key)
        self._metadata = self._connection.metadata()
        self._timeout = timeout
        self._retries = retries
        self._in_flight = in_flight
        self._closed = False
        self._process = os.getpid()
        self._open()

    def _open(self) -> None:
        """What needs no event loop is opened at once."""

    def _attempts(self, settings: Settings) -> Attempts:
        if os.getpid() != self._process:  # gRPC's threads are not there, and a call might never end
            raise BeamlineError("this client was made before the process forked: make one in the child")
        return Attempts(self._retries, self._timeout if settings.timeout is None else settings.timeout)

    def _sent(self, settings: Settings) -> list[tuple[str, str]]:
        return [*self._metadata, *settings.metadata]

    def _failure(self, error: grpc.RpcError, attempts: Attempts) -> BeamlineError:
        if self._closed:
            return Cancelled(CLOSED)
        return failure_of(error, self._connection, attempts.timeout)

    def _delay(self, error: grpc.RpcError, attempts: Attempts) -> float:
        """Seconds until the next attempt. Raises what the error means where there is none."""
        try:
            return attempts.delay(self._failure(error, attempts))
        except BeamlineError as failure:
            raise failure from error
