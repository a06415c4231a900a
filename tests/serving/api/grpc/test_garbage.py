"""Bytes that are no message, through a real channel: the client's mistake, so INVALID_ARGUMENT."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.serving.server import Server
from tests.serving.doubles import EngineDouble, eventually, running


async def send(server: Server, data: bytes, method: str = "Translate") -> bytes:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        # No serializers: the bytes are sent as they are.
        call: Any = channel.unary_unary(f"/beamline.v1.Inference/{method}", None, None)
        answer: bytes = await call(data)
        return answer


def spoiled(message: pb.TranslateRequest) -> bytes:
    return message.SerializeToString().replace(b"SPOIL", b"\xff\xfe\xff\xfe\xff")


@pytest.mark.parametrize(
    "message",
    [
        pb.TranslateRequest(inputs=[pb.Input(text="SPOIL")]),
        pb.TranslateRequest(model="SPOIL", inputs=[pb.Input(text="a")]),
        pb.TranslateRequest(inputs=[pb.Input(text="a")], options=pb.DecodingOptions(target_prefix="a SPOIL b")),
    ],
    ids=["text", "model", "target_prefix"],
)
async def test_invalid_utf8_is_the_callers_mistake(message: pb.TranslateRequest) -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(server, spoiled(message))
        sample = server.metrics.registry.get_sample_value
        await eventually(lambda: sample("beamline_refused_total", {"reason": "invalid"}) == 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert "beamline.v1.TranslateRequest" in details
    assert "UTF-8" in details


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x0a\x7f", b"\x1a\x02\x0a\x7f"])
async def test_a_broken_message_is_the_callers_mistake(data: bytes) -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(server, data)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_server_goes_on_afterwards() -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await send(server, b"\xff")
        good = pb.TranslateRequest(inputs=[pb.Input(text="good")])
        answer = pb.TranslateResponse.FromString(await send(server, good.SerializeToString()))
    assert answer.translations[0].hypotheses[0].text == "good"


async def test_unknown_methods_are_unimplemented() -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(server, b"", method="Nothing")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_beyond_the_transports_limit_is_refused_by_it() -> None:
    async with running(EngineDouble()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(server, b"x" * (17 * 1024 * 1024))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
