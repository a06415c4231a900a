"""What clients and models in process raise. It is the one tree of `beamline.serving.errors`: what a server refuses is
raised here as the class that the server raised, where the status of the call says so.

    BeamlineError
    ├── RequestError
    │   ├── InvalidRequest          an option or a text has a value that is not allowed
    │   │   └── InvalidItem         one item of a list is at fault: `index` says which
    │   ├── ModelNotFound           no such model or version there
    │   ├── Unavailable             nothing answers at the target, or what answers can't serve this now
    │   │   └── Misconnected        an HTTP port, or only one side talks TLS: trying again does not help
    │   ├── Overloaded              the server has no capacity left: `retry_after` seconds, where it says so
    │   ├── DeadlinePassed          no answer within `timeout`
    │   ├── Cancelled               the call was cancelled, or the client closed
    │   ├── Unauthenticated         the server wants a token, or doesn't know this one
    │   ├── Forbidden               the token is known, but not for this
    │   └── Unimplemented           this server does not have that method
    ├── ModelError                  a model on disk can't be loaded: the file and what is wrong with it
    └── InternalError               the server failed; its log has more under the request id of the message
"""

from __future__ import annotations

from beamline.serving.errors import (
    BeamlineError,
    Cancelled,
    DeadlinePassed,
    Forbidden,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    Overloaded,
    RequestError,
    Unauthenticated,
    Unimplemented,
)

__all__ = [
    "BeamlineError",
    "Cancelled",
    "DeadlinePassed",
    "Forbidden",
    "InternalError",
    "InvalidItem",
    "InvalidRequest",
    "Misconnected",
    "ModelError",
    "ModelNotFound",
    "Overloaded",
    "RequestError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]


class InvalidItem(InvalidRequest):
    """One item of a list can't be processed; the others could."""

    def __init__(self, sentence: str, index: int) -> None:
        super().__init__(sentence)
        self.index = index  # its place in the list

    def __reduce__(self) -> tuple[type[InvalidItem], tuple[str, int]]:
        return type(self), (str(self), self.index)


class Unavailable(RequestError):
    def __init__(self, sentence: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after  # seconds; None where the server doesn't say


class Misconnected(Unavailable):
    """The connection can't come to be as it is configured."""


class InternalError(BeamlineError):
    pass
