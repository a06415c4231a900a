"""How a client reaches a server: target, TLS, token. It knows no method of any service."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from beamline.errors import BeamlineError

TARGET_VARIABLE = "BEAMLINE_TARGET"
DEFAULT_TARGET = "127.0.0.1:8001"

Option = tuple[str, Any]

# A client tries again by itself, and knows when a first piece has arrived; gRPC's own retries would hide the hint.
# All addresses of a name are asked, in turn; by default it would be the first that answers, for as long as it does.
# A server that starts again is found soon, instead of after gRPC's minutes. "min" is how long an attempt to connect may
# take: some round trips, where a server is far away and talks TLS.
# A machine that is gone without a word is asked for a sign after five minutes, no sooner than any gRPC server and proxy
# puts up with. Besides, where gRPC may ask, it has the kernel end a connection on which nothing is acknowledged for so
# long as it would wait for the sign.
CHANNEL_OPTIONS: tuple[Option, ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


@dataclass(frozen=True, slots=True)
class Connection:
    """`tls`: None is no encryption, True trusts the public authorities, a path is a PEM file of those to trust."""

    target: str
    token: str | None = field(default=None, repr=False)
    tls: bool | str | Path | None = None
    client_cert: str | Path | None = None
    client_key: str | Path | None = None

    def __post_init__(self) -> None:
        if self.encrypted:
            if (self.client_cert is None) != (self.client_key is None):
                raise BeamlineError("client_cert and client_key belong together: give both")
        elif self.client_cert is not None or self.client_key is not None:
            raise BeamlineError("client_cert and client_key need tls as well: True, or a file of trusted authorities")
        if self.token is not None and not (self.token.strip() and self.token.isascii() and self.token.isprintable()):
            raise BeamlineError("the token must be printable ASCII text, as `beamline token` prints it")

    @property
    def encrypted(self) -> bool:
        return self.tls is not None and self.tls is not False

    def metadata(self) -> list[tuple[str, str]]:
        return [] if self.token is None else [("authorization", f"Bearer {self.token.strip()}")]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: the connection is not encrypted. Reads the files."""
        if self.tls is None or self.tls is False:
            return None
        authorities = None if self.tls is True else _authorities(self.tls)
        key, certificate = (None if path is None else read_file(path) for path in (self.client_key, self.client_cert))
        if self.client_cert is not None and self.client_key is not None:
            _check_pair(Path(self.client_cert), Path(self.client_key))
        return grpc.ssl_channel_credentials(authorities, key, certificate)

    def channel(self, options: tuple[Option, ...] = CHANNEL_OPTIONS) -> grpc.Channel:
        credentials = self.credentials()
        if credentials is None:
            return grpc.insecure_channel(self.target, options=options)
        return grpc.secure_channel(self.target, credentials, options=options)

    def aio_channel(self, options: tuple[Option, ...] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """Belongs to the event loop that runs."""
        credentials = self.credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        return grpc.aio.secure_channel(self.target, credentials, options=options)


def _authorities(path: str | Path) -> bytes:
    """gRPC would only say that nothing can be reached."""
    content = read_file(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        said = f"{path} holds no certificate: tls (--tls-ca) takes a PEM file of the authorities to trust"
        raise BeamlineError(said) from error
    return content


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC would only say that nothing can be reached."""

    def no_password() -> str:
        raise BeamlineError(f"the private key {key} is encrypted; give it without a passphrase")

    if not (certificate.is_file() and key.is_file()):  # a pipe can be read once
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            said = f"{key} is not the private key of the certificate {certificate}: give the one that belongs to it"
        else:
            said = f"{certificate} and {key} must be a certificate and its private key, both PEM"
        raise BeamlineError(said) from error


def target_of(given: str | None) -> str:
    """What is given, else the environment's, else the port of a server on this machine."""
    if given is not None:
        name, target = "target", given
    else:
        name, target = TARGET_VARIABLE, os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET
    if target.startswith(("http://", "https://")):
        raise BeamlineError(f"{name} is {target!r}; give HOST:PORT of the gRPC port, for instance {DEFAULT_TARGET}")
    if ":" not in target:
        raise BeamlineError(f"{name} is {target!r}, without a port; give HOST:PORT, for instance {DEFAULT_TARGET}")
    host, _, port = target.rpartition(":")
    if target.count(":") == 1 and host and not (port.isdecimal() and 0 < int(port) < 65536):
        raise BeamlineError(f"{name} is {target!r}; its port must be a number from 1 to 65535")
    return target


def read_token(path: str | Path) -> str:
    """The only content of a file."""
    token = read_file(path).decode("utf-8", "replace").strip()
    if not (token.isascii() and token.isprintable()):
        raise BeamlineError(f"{path} holds no token")
    return token


def read_file(path: str | Path) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BeamlineError(f"{path} can't be read: {error.strerror}") from error
    if not content.strip():  # an empty certificate would end the process inside gRPC
        raise BeamlineError(f"{path} is empty")
    return content
