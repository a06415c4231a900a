"""Which method needs which scope. What is not listed needs the strongest one, so nothing new is open by accident."""

from __future__ import annotations

from pathlib import Path

from beamline.serving.errors import Forbidden, Unauthenticated
from beamline.serving.security.tokens import Client, Scope, TokenFile

# Whoever decides whether we live asks without credentials.
_OPEN_SERVICES = ("grpc.health.v1.Health",)

_INFER_SERVICES = (
    "beamline.v1.Inference",
    "inference.GRPCInferenceService",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)

# Of the services above, what changes the server rather than asks it.
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
    """Of a method as gRPC names it, `/package.Service/Method`. None: open to everybody."""
    service, _, name = method.removeprefix("/").partition("/")
    if service in _OPEN_SERVICES:
        return None
    return Scope.INFER if service in _INFER_SERVICES and name not in _ADMIN_METHODS else Scope.ADMIN


class Access:
    """Without a token file everybody may do everything: the network, or client certificates, keep strangers out."""

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
