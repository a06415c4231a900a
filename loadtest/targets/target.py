"""A server under test as the load tester sees it, whatever the protocol: a request goes in, a reply comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Names and values as the command line has them; what they mean depends on the protocol.
Options = tuple[tuple[str, str], ...]


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


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    text: str
    model: str  # NAME or NAME/VERSION; empty: the server's default
    options: Options


@dataclass(frozen=True, slots=True)
class Reply:
    """What is kept of an answer.

    `token_times`: when each piece of a streamed answer arrived, by `time.monotonic`; empty for one that came whole."""

    status: int
    detail: str = ""
    source_tokens: int = 0
    target_tokens: int = 0
    server_queue: float = float("nan")
    token_times: Sequence[float] = ()


class Target(Protocol):
    """One class for each protocol."""

    async def connect(self) -> None:
        """Returns when every connection is open, so that opening them is not measured. Raises `LoadTestError` with the
        reason if they are not in time."""
        ...

    async def send(self, request: Request) -> Reply:
        """Never raises: a failure is a reply too."""
        ...

    async def close(self) -> None: ...


def model_and_version(model: str) -> tuple[str, str]:
    """`en-de/2` is version 2 of `en-de`."""
    name, slash, version = model.rpartition("/")
    return (name, version) if slash and version.isdigit() else (model, "")
