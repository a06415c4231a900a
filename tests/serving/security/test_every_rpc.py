"""No RPC is forgotten: the server itself lists them, by reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from beamline.serving.security.access import Scope, scope_of
from beamline.serving.security.tokens import new_token
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, eventually, running

HEALTH = "/grpc.health.v1.Health/"
PAST = datetime(2020, 1, 1, tzinfo=UTC)


class Tokens:
    def __init__(self, path: Path) -> None:
        self.path = path
        made = {
            name: new_token(name, (scope,), expires)
            for name, scope, expires in (
                ("reader", Scope.INFER, None),
                ("boss", Scope.ADMIN, None),
                ("late", Scope.ADMIN, PAST),
            )
        }
        path.write_text("\n".join(entry for _, entry in made.values()))
        self.reader, self.boss, self.late = (token for token, _ in made.values())


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens.toml")


@pytest.fixture
async def server(tokens: Tokens) -> AsyncIterator[Server]:
    async with running(EngineDouble(), tokens=tokens.path) as server:
        yield server


async def _reflect(channel: Any, metadata: Any, **question: str) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(**question)

    async for answer in stub.ServerReflectionInfo(ask(), metadata=metadata):
        return answer


async def reflected(channel: Any, token: str) -> dict[str, Any]:
    """Every method that the server names, with its descriptor, from nothing but what the server says of itself."""
    metadata = (("authorization", f"Bearer {token}"),)
    services = (await _reflect(channel, metadata, list_services="")).list_services_response.service
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for service in services:
        answer = await _reflect(channel, metadata, file_containing_symbol=service.name)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[file.name] = file
    pool: Any = descriptor_pool.DescriptorPool()
    for file in files.values():
        pool.Add(file)
    return {
        f"/{service.name}/{method.name}": method
        for service in services
        for method in pool.FindServiceByName(service.name).methods
    }


async def answer_to(channel: Any, method: str, about: Any, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError | None:
    """What an empty message gets."""

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    kind = "_".join("stream" if streams else "unary" for streams in (about.client_streaming, about.server_streaming))
    call = getattr(channel, kind)(method, None, None)(
        nothing() if about.client_streaming else b"", metadata=metadata, timeout=60
    )
    try:
        if not about.server_streaming:
            await call
            return None
        async for _ in call:
            call.cancel()
            return None
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_missing_wrong_and_expired_credentials_are_refused_on_every_rpc(server: Server, tokens: Tokens) -> None:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        methods = await reflected(channel, tokens.reader)
        assert "/beamline.v1.Inference/Translate" in methods
        assert "/inference.GRPCInferenceService/RepositoryModelLoad" in methods
        assert len({method.split("/")[1] for method in methods}) >= 4
        guarded = [method for method in methods if not method.startswith(HEALTH)]
        for method in guarded:
            for header in (
                None,
                "",
                "Bearer ",
                "Bearer bl_wrong",
                f"Basic {tokens.boss}",
                tokens.boss,
                f"Bearer {tokens.late}",
                f"Bearer {tokens.boss[:-1]}",
            ):
                metadata = [] if header is None else [("authorization", header)]
                refused = await answer_to(channel, method, methods[method], *metadata)
                assert refused is not None, (method, header)
                assert refused.code() is grpc.StatusCode.UNAUTHENTICATED, (method, header)

        def counted() -> float:
            return sum(
                sample.value
                for family in server.metrics.registry.collect()
                for sample in family.samples
                if sample.name == "beamline_refused_total" and sample.labels["reason"] == "unauthenticated"
            )

        await eventually(lambda: counted() == 8 * len(guarded))


async def test_with_the_right_token_every_rpc_is_reached(server: Server, tokens: Tokens) -> None:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        for method, about in (await reflected(channel, tokens.reader)).items():
            admin = scope_of(method) is Scope.ADMIN
            for token in (tokens.reader, tokens.boss):
                found = await answer_to(channel, method, about, ("authorization", f"Bearer {token}"))
                code = grpc.StatusCode.OK if found is None else found.code()
                assert code is not grpc.StatusCode.UNAUTHENTICATED, method
                assert (code is grpc.StatusCode.PERMISSION_DENIED) == (admin and token == tokens.reader), method


async def test_health_needs_no_credentials(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        check: Any = channel.unary_unary(f"{HEALTH}Check", None, None)
        answer = await check(b"")
    assert answer == b"\x08\x01"


async def test_reflection_is_no_way_in(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _reflect(channel, (), list_services="")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
