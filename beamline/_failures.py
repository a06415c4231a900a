"""What a failed call means to its caller: an exception of `beamline.errors` with a sentence, and when to try again."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress
from typing import Any

import grpc

from beamline._calls.operation import TooLarge, deadline_sentence
from beamline._channel import TARGET_VARIABLE, Connection
from beamline.errors import (
    BeamlineError,
    Cancelled,
    DeadlinePassed,
    Forbidden,
    InternalError,
    InvalidRequest,
    Misconnected,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

_REQUEST_ID = "x-request-id"  # in the trailing metadata of whatever a beamline server answers
_PUSHBACK = "grpc-retry-pushback-ms"

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds; twice as long each time

_HTTP_PORT = "that is an HTTP port (of the gateway or of the metrics): give the gRPC port, 8001 unless configured"

_CERTIFICATE = (
    "if it wants to see a certificate, give client_cert and client_key (--tls-cert, --tls-key) of an authority that it "
    "trusts"
)

# What gRPC says of a connection that never came to be, and what it means here: without TLS, and with it.
_HINTS: dict[bool, tuple[tuple[str, str], ...]] = {
    False: (
        ("http1.x server", _HTTP_PORT),
        ("Expected SETTINGS frame", _HTTP_PORT),
        ("Socket closed", "it closes the connection: if it wants TLS, give tls (--tls, --tls-ca)"),
        ("reset by peer", "it closes the connection: if it wants TLS, give tls (--tls, --tls-ca)"),
    ),
    True: (
        ("http1.x server", _HTTP_PORT),
        ("Expected SETTINGS frame", _HTTP_PORT),
        ("WRONG_VERSION_NUMBER", "it does not talk TLS: leave tls (--tls, --tls-ca) away"),
        (
            "CERTIFICATE_VERIFY_FAILED",
            "its certificate is not of an authority that is trusted: give its file as tls (--tls-ca)",
        ),
        ("Hostname Verification", "its certificate is for another name than the target's"),
        ("Cannot check peer", "it talks TLS without HTTP/2: give the gRPC port, 8001 unless configured"),
        ("Socket closed", _CERTIFICATE),
        ("reset by peer", _CERTIFICATE),
    ),
}

# Where gRPC does not tell what it saw.
_UNKNOWN = {
    False: "if it wants TLS, give tls (--tls, --tls-ca), and the gRPC port, 8001 unless configured",
    True: "it must talk TLS, with a certificate for this name by an authority of tls (--tls, --tls-ca); "
    f"{_CERTIFICATE}",
}

_UNCERTAIN = ("Socket closed", "reset by peer")  # so does a server that is about to end


def failure_of(error: Any, connection: Connection, timeout: float | None) -> BeamlineError:
    """`error` is the call's `grpc.RpcError`; `timeout` what the caller gave."""
    code, sentence = error.code(), str(error.details())
    trailing = {str(key): value for key, value in error.trailing_metadata() or ()}
    answered = _REQUEST_ID in trailing
    hint = _retry_hint(trailing.get(_PUSHBACK))
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(sentence, hint) if answered else _unreached(sentence, connection)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if not answered and "larger than max" in sentence:
            return TooLarge("the call is larger than the server takes (its --max-message-mib): send less at once")
        return Overloaded(sentence, hint)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(sentence if answered or timeout is None else deadline_sentence(timeout))
    if code is grpc.StatusCode.UNIMPLEMENTED and not answered:
        return Unimplemented(f"what answers at {connection.target} speaks gRPC, but has no such method: no beamline?")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(f"{sentence} (here: token=..., or --token-file)")
    kind = _KINDS.get(code)
    return InternalError(f"{sentence} ({code.name})") if kind is None else kind(sentence)


_KINDS: dict[Any, type[BeamlineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def _unreached(details: str, connection: Connection) -> Unavailable:
    target = connection.target
    connecting = any(words in details for words in ("failed to connect", "connections to all backends failing"))
    found = next((pair for pair in _HINTS[connection.encrypted] if pair[0] in details and connecting), None)
    if found is not None:
        says, hint = found
        kind = Unavailable if says in _UNCERTAIN else Misconnected
        return kind(f"the server at {target} can't be talked to: {hint}")
    if "resolving" in details or "DNS" in details:
        return Unavailable(f"the host name of {target} is not known: check the target")
    if connecting and _listens_here(target):
        return Unavailable(f"the server at {target} can't be talked to: {_UNKNOWN[connection.encrypted]}")
    if connecting:
        return Unavailable(
            f"nothing answers at {target}: start a server with `beamline serve`, "
            f"or say where it is (target, --target or {TARGET_VARIABLE})"
        )
    return Unavailable(f"the connection to {target} was lost before the answer was there")


def _listens_here(target: str) -> bool:
    """gRPC tries both addresses of `localhost`, and tells of the one that failed last: it may be the one where nothing
    is. Of other names that is not asked: only here it takes no time."""
    host, _, port = target.rpartition(":")
    if host != "localhost":
        return False
    for address in ("127.0.0.1", "::1"):
        with suppress(OSError), socket.create_connection((address, int(port)), timeout=0.2):
            return True
    return False


def _retry_hint(text: Any) -> float | None:
    try:
        return int(text) / 1000
    except (TypeError, ValueError):
        return None


class Attempts:
    """When a call may be tried again: within its deadline, later each time or as the server says; a number of times,
    or until the deadline where no server is there."""

    def __init__(self, retries: int, timeout: float | None) -> None:
        self.timeout = timeout
        self._left = retries
        self._retries = retries
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._answered = [0]  # calls, shared by those of one list
        self._seen = 0

    def again(self) -> Attempts:
        """For another call of the same list: the same deadline, and all the attempts."""
        other = Attempts(self._retries, None)
        other.timeout, other._deadline, other._answered = self.timeout, self._deadline, self._answered
        return other

    def answered(self) -> None:
        """A server that answers the others of a list, one by one, will answer this call, too: its attempts begin anew.
        So a limit of calls per client makes a list slow, and not fail."""
        self._answered[0] += 1

    @property
    def remaining(self) -> float | None:
        """Seconds for the next attempt. Raises `DeadlinePassed`."""
        if self._deadline is None or self.timeout is None:
            return None
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise DeadlinePassed(deadline_sentence(self.timeout))
        return seconds

    def delay(self, failure: BeamlineError) -> float:
        """Seconds to wait before the next attempt. Raises the failure where there is none."""
        if self._answered[0] != self._seen:
            self._seen, self._left = self._answered[0], self._retries
        if not isinstance(failure, Unavailable | Overloaded) or isinstance(failure, Misconnected):
            raise failure
        # Who gives a deadline waits that long for a server that starts again; one that is overloaded is spared.
        until_deadline = isinstance(failure, Unavailable) and self._deadline is not None and self._retries > 0
        if self._left <= 0 and not until_deadline:
            raise failure
        hint = failure.retry_after
        if hint is not None and hint < 0:  # gRPC's way of saying: not again
            raise failure
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(self._retries - self._left, 16))
        self._left -= 1
        # Clients that were refused together don't come back together; never before the server's hint.
        delay = delay * random.uniform(0.5, 1) if hint is None else hint * random.uniform(1, 1.1)
        if self._deadline is not None and time.monotonic() + delay >= self._deadline:
            raise failure
        return delay
