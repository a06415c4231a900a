"""Clients that stop reading: their calls are given up and counted; neither a model nor the server waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import trustme

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2
from beamline.serving.api.http.stalled import close_stalled
from beamline.serving.api.inference import Inference
from beamline.serving.security.tls import TlsFiles
from beamline.serving.server import Server
from tests.serving.doubles import WAIT_SECONDS, EngineDouble, connected, eventually, running

# Some megabytes in many messages: more than any buffer between the two takes.
MANY = pb.TranslateRequest(
    inputs=[pb.Input(text="a" * 60)] * 1024,
    options=pb.DecodingOptions(num_hypotheses=8, beam_size=8, return_tokens=True, return_scores=True),
)
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))

Replies = AsyncGenerator[pb.TranslateReply]


@asynccontextmanager
async def patient_server() -> AsyncIterator[Server]:
    async with running(EngineDouble(), http_port=0, write_seconds=0.5) as server:
        yield server


def refused(server: Server) -> float:
    return server.metrics.registry.get_sample_value("beamline_refused_total", {"reason": "slow_reader"}) or 0.0


def counted(server: Server, method: str) -> float:
    labels = {"method": method, "code": "RESOURCE_EXHAUSTED"}
    return server.metrics.registry.get_sample_value("beamline_calls_total", labels) or 0.0


async def given_up(server: Server, method: str) -> None:
    await eventually(lambda: refused(server) == 1)
    await asyncio.wait_for(server.lifecycle.idle(), WAIT_SECONDS)  # nobody uses the model any more
    await eventually(lambda: counted(server, method) == 1)


async def test_a_grpc_stream_that_nobody_reads_is_given_up() -> None:
    async with patient_server() as server, connected(server, NARROW) as stub:
        call = stub.TranslateStream(MANY)
        assert (await call.read()).HasField("translation")
        await given_up(server, "/beamline.v1.Inference/TranslateStream")
        assert (await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]))).model == "fake"
        call.cancel()


async def test_a_stream_of_the_open_inference_protocol_is_given_up() -> None:
    texts = b"".join(len(text).to_bytes(4, "little") + text for text in [b"a" * 60] * 1024)
    request = open_inference_pb2.ModelInferRequest(model_name="fake", raw_input_contents=[texts])
    request.inputs.add(name="text", datatype="BYTES", shape=[1024])
    request.outputs.add(name="token_ids")
    request.parameters["num_hypotheses"].int64_param = 8
    request.parameters["beam_size"].int64_param = 8

    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    async with (
        patient_server() as server,
        grpc.aio.insecure_channel(server.grpc_address, options=NARROW) as channel,
    ):
        call = channel.stream_stream(
            method,
            open_inference_pb2.ModelInferRequest.SerializeToString,
            open_inference_pb2.ModelStreamInferResponse.FromString,
        )()
        for _ in range(4):
            await call.write(request)
        await given_up(server, method)
        call.cancel()


async def stalled_connection(server: Server, accept: str, small: bool = True) -> socket.socket:
    """It has sent its request, and reads no answer. A small one takes little before it is full."""
    host, port = str(server.http_address).split(":")
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, int(port)))
    await loop.sock_sendall(connection, translate_call(accept))
    return connection


def translate_call(accept: str) -> bytes:
    texts: list[dict[str, Any]] = [{"text": "a" * 60}] * 1024
    options = {"num_hypotheses": 8, "beam_size": 8, "return_tokens": True, "return_scores": True}
    body = json.dumps({"inputs": texts, "options": options}).encode()
    head = f"POST /v1/translate HTTP/1.1\r\nhost: a\r\naccept: {accept}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Looks(set[Any]):
    """Connections, and how often somebody went through them."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return super().__iter__()


def looked_at(server: Server) -> Looks:
    """In place of the set that it has."""
    assert server._gateway is not None
    assert server._gateway._uvicorn is not None
    state = server._gateway._uvicorn.server_state
    state.connections = connections = Looks()
    return connections


async def test_events_that_nobody_reads_are_given_up() -> None:
    async with patient_server() as server:
        with await stalled_connection(server, "text/event-stream"):
            await given_up(server, "POST /v1/translate")
            assert server._gateway is not None
            await asyncio.wait_for(server._gateway.finish(), WAIT_SECONDS)  # the connection is closed, too


async def test_events_behind_an_answer_that_nobody_reads_are_given_up() -> None:
    """They have not begun to be sent."""
    async with patient_server() as server:
        with await stalled_connection(server, "application/json") as connection:
            await asyncio.get_running_loop().sock_sendall(connection, translate_call("text/event-stream"))
            await given_up(server, "POST /v1/translate")
            assert server._gateway is not None
            await asyncio.wait_for(server._gateway.finish(), WAIT_SECONDS)


class Leaving:
    """What is left of a connection by TLS while it is being closed, for a moment or for half a minute."""

    def __init__(self, aborted: asyncio.Event, has_parts: bool) -> None:
        self.flow, self.cycle, self.transport = SimpleNamespace(write_paused=True), None, self
        self.abort, self._has_parts = aborted.set, has_parts

    def get_extra_info(self, name: str) -> None:
        if not self._has_parts:
            raise AttributeError

    def get_write_buffer_size(self) -> int:
        return 1


async def test_connections_that_are_being_closed_are_left_alone() -> None:
    """And the others are looked at as before."""
    left, closed = asyncio.Event(), asyncio.Event()
    with socket.socket() as idle:
        stalled = Leaving(closed, True)
        stalled.get_extra_info = lambda name: idle  # type: ignore[method-assign, assignment]
        connections = [Leaving(left, True), Leaving(left, False), stalled]
        task = asyncio.create_task(close_stalled(lambda: connections, 0.01))
        await asyncio.wait_for(closed.wait(), WAIT_SECONDS)
        task.cancel()
    assert not left.is_set()


@pytest.mark.parametrize(("events", "tls"), [(0, False), (4, False), (4096, False), (4096, True)])  # 0: one response
async def test_a_slow_reader_gets_everything(
    events: int, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It always takes something within the time that it has, and needs far longer in all."""
    text = "Q" * (2**25 // max(events, 1))

    async def stream(self: Inference, request: pb.TranslateRequest, deadline: float | None) -> Replies:
        for _ in range(events):
            yield pb.TranslateReply(text=text)

    async def translate(self: Inference, request: pb.TranslateRequest, deadline: float | None) -> pb.TranslateResponse:
        return pb.TranslateResponse(model=text)

    monkeypatch.setattr(Inference, "TranslateStream", stream)
    monkeypatch.setattr(Inference, "Translate", translate)
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trust)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = TlsFiles(tmp_path / "server.pem", tmp_path / "server.pem") if tls else None
    async with running(EngineDouble(), http_port=0, write_seconds=0.5, tls=files) as server:
        connections = looked_at(server)
        host, port = str(server.http_address).split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trust if tls else None)
        writer.write(translate_call("text/event-stream" if events else "application/json"))
        received, taken = 0, 0
        while received < 2**25:
            data = await reader.read(2**18)
            assert data, "it was cut off"
            received += data.count(b"Q")
            taken += len(data)
            if taken >= 3 * 2**19:
                seen, taken = connections.count, 0
                await eventually(lambda seen=seen: connections.count > seen)  # type: ignore[misc]
        writer.close()
        assert connections.count > 12  # three times as long as it may take nothing
        assert refused(server) == 0


async def test_a_stream_that_was_given_up_ends_though_its_reader_goes_on() -> None:
    async with patient_server() as server:
        with await stalled_connection(server, "text/event-stream", small=False) as connection:
            await eventually(lambda: refused(server) == 1)
            with suppress(ConnectionResetError):
                while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 2**20), WAIT_SECONDS):
                    pass


async def test_a_stream_whose_next_event_takes_long_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is full, but there is nothing to be sent: it stays. The next event finds that nobody reads."""
    more = asyncio.Event()

    async def stream(self: Inference, request: pb.TranslateRequest, deadline: float | None) -> Replies:
        for _ in range(2):
            yield pb.TranslateReply(text="a" * 2**23)
            await more.wait()

    monkeypatch.setattr(Inference, "TranslateStream", stream)
    async with patient_server() as server:
        connections = looked_at(server)
        with await stalled_connection(server, "text/event-stream"):
            await eventually(lambda: any(each.flow.write_paused for each in list(connections)))
            connections.count = 0
            await eventually(lambda: connections.count > 12)  # three times as long as a reader has
            assert len(connections) == 1
            assert refused(server) == 0
            more.set()
            await given_up(server, "POST /v1/translate")
            assert server._gateway is not None
            await asyncio.wait_for(server._gateway.finish(), WAIT_SECONDS)


async def test_a_response_that_nobody_reads_does_not_keep_the_server() -> None:
    async with patient_server() as server:
        with await stalled_connection(server, "application/json"):
            sample, call = server.metrics.registry.get_sample_value, {"method": "POST /v1/translate", "code": "OK"}
            await eventually(lambda: sample("beamline_calls_total", call) == 1)
            assert server._gateway is not None
            await asyncio.wait_for(server._gateway.finish(), WAIT_SECONDS)
