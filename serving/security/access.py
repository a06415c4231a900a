"""Which method needs which scope, and if a token has it. A method that is not listed needs the scope `admin`, so a
new one is never open by accident."""

from __future__ import annotations

from pathlib import Path

from beamline.serving.errors import Forbidden, Unauthenticated
from beamline.serving.security.tokens import Client, Scope, TokenFile

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
    """Without a token file every client may call everything: the network, or client certificates, must protect the
    server."""

    def __init__(self, tokens: Path | None) -> None:
        self._tokens = None if tokens is None else TokenFile(tokens)

    def check(self, scope: Scope | None, authorization: str | None) -> Client:
        """`authorization` is the header of that name. Raises `Unauthenticated` or `Forbidden`."""
        if self._tokens is None or scope is None:
            return Client()
        if authorization is None:
            raise Unauthenticated("this server wants a bearer token: send the header 'authorization: Bearer TOKEN'")
        if not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("the authorization header must be 'Bearer TOKEN'")
        client = self._tokens.client_of(authorization[len(_SCHEME) :].strip())
        if not client.may(scope):
            raise Forbidden(f"the token {client.name!r} may not do this: it needs the scope {scope.value!r}")
        return client
