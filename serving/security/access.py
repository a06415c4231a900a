"""Who may call what, and how much of it at once: the scope that a method needs, the scopes that a client has, and the
limit of concurrent calls per client. A method that is not listed needs the scope `admin`, so a new one is never open by
accident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from beamline.serving.errors import Forbidden, Overloaded, Unauthenticated


class Scope(StrEnum):
    INFER = "infer"
    ADMIN = "admin"  # load, unload and other management; includes `infer`


@dataclass(frozen=True, slots=True)
class Client:
    """An authenticated client. On a server without tokens, clients have no names and every scope."""

    name: str | None = None
    scopes: frozenset[Scope] = frozenset(Scope)

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


# Health checks of orchestrators and load balancers come without credentials.
_OPEN_SERVICES = ("grpc.health.v1.Health",)

_INFER_SERVICES = (
    "beamline.v1.Inference",
    "inference.GRPCInferenceService",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)

# The methods of the services above that change the server.
_ADMIN_METHODS = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)

_SCHEME = "bearer "


def scope_of(method: str) -> Scope | None:
    """`method` is its name in gRPC, `/package.Service/Method`. None: it needs no token."""
    service, _, name = method.removeprefix("/").partition("/")
    if service in _OPEN_SERVICES:
        return None
    return Scope.INFER if service in _INFER_SERVICES and name not in _ADMIN_METHODS else Scope.ADMIN


class Access:
    """`client_of` knows the tokens, and raises `Unauthenticated` for others. Without it every client may call
    everything: the network, or client certificates, must protect the server."""

    def __init__(self, client_of: Callable[[str], Client] | None) -> None:
        self._client_of = client_of

    def check(self, scope: Scope | None, authorization: str | None) -> Client:
        """`authorization` is the header of that name. Raises `Unauthenticated` or `Forbidden`."""
        if self._client_of is None or scope is None:
            return Client()
        if authorization is None:
            raise Unauthenticated("this server wants a bearer token: send the header 'authorization: Bearer TOKEN'")
        if not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("the authorization header must be 'Bearer TOKEN'")
        client = self._client_of(authorization[len(_SCHEME) :].strip())
        if not client.may(scope):
            raise Forbidden(f"the token {client.name!r} may not do this: it needs the scope {scope.value!r}")
        return client


class ClientLimit:
    """Of concurrent calls. Not thread-safe: it belongs to the event loop. Clients without a running call are forgotten,
    so that its memory is bounded."""

    def __init__(self, max_calls: int | None) -> None:
        self._max_calls = max_calls
        self._running: Counter[str] = Counter()

    @contextmanager
    def call(self, client: str) -> Iterator[None]:
        if self._max_calls is not None and self._running[client] >= self._max_calls:
            raise Overloaded(
                f"you have {self._max_calls} calls running here, the most that one client may have: wait for an answer"
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
