"""What may not keep a server that was asked to end. Short samples, without clocks, are in tests/serving/http and
tests/serving/commands."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.processes import PATIENCE, ServerProcess, eventually, serving

LIMIT = 1  # seconds
TRANSLATE = "POST /v1/translate HTTP/1.1\r\nhost: a\r\n"


def connect(address: str, data: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect((host, int(port)))
    client.sendall(data)
    return client


def ask(server: ServerProcess, *texts: str, accept: str = "*/*") -> socket.socket:
    body = json.dumps({"inputs": [{"text": text} for text in texts]}).encode()
    head = f"{TRANSLATE}accept: {accept}\r\ncontent-length: {len(body)}\r\n\r\n"
    return connect(server.http, head.encode() + body)


def open_stream(server: ServerProcess) -> socket.socket:
    client = ask(server, "b" * 1000, accept="text/event-stream")
    assert client.recv(15).startswith(b"HTTP/1.1 200 ")
    return client


def running_call(server: ServerProcess) -> socket.socket:
    client = ask(server, "b" * 1000)
    eventually(lambda: server.metrics()("beamline_active_slots") > 0, "it is decoded")
    return client


def occupied(server: ServerProcess) -> bool:
    """Whether somebody has a slot. Metrics say it when a step is over."""
    with urllib.request.urlopen(f"http://{server.http}/v1/live/batch", timeout=PATIENCE) as response:
        return any(model["running"] for model in json.load(response)["models"])


def half_head(server: ServerProcess) -> socket.socket:
    return connect(server.http, TRANSLATE.encode())


def half_body(server: ServerProcess) -> socket.socket:
    return connect(server.http, f"{TRANSLATE}content-length: 100\r\n\r\n{{".encode())


def endless_body(server: ServerProcess) -> socket.socket:
    client = connect(server.http, f"{TRANSLATE}transfer-encoding: chunked\r\n\r\n".encode())

    def drip() -> None:
        with suppress(OSError):
            while True:
                client.sendall(b"1\r\n \r\n")
                time.sleep(0.02)

    threading.Thread(target=drip, daemon=True).start()
    return client


def half_request_to_operators(server: ServerProcess) -> socket.socket:
    return connect(server.metrics_address, b"GET /metrics HTTP/1.1\r\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("keep", "code"),
    [
        (open_stream, 1),
        (running_call, 1),
        (half_head, 0),
        (half_body, 0),
        (endless_body, 0),
        (half_request_to_operators, 0),
    ],
)
def test_nobody_keeps_it_longer_than_the_limit(
    keep: Callable[[ServerProcess], socket.socket], code: int, tmp_path: Path
) -> None:
    arguments = ("--fake", "--fake-step-ms", "500", "--drain-seconds", str(LIMIT))
    with serving(tmp_path / "log.txt", *arguments) as server, keep(server), keep(server):
        began = time.monotonic()
        assert server.stop() == code
        assert time.monotonic() - began < 10 * LIMIT
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.full
def test_nor_a_step_that_hangs(tmp_path: Path) -> None:
    """A thread can't be ended from outside; the process can."""
    arguments = ("--fake", "--fake-step-ms", "3600000", "--drain-seconds", str(LIMIT))
    with serving(tmp_path / "log.txt", *arguments) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        call = stub.Translate.future(pb.TranslateRequest(inputs=[pb.Input(text="a")]))
        eventually(lambda: occupied(server), "it has a slot")
        began = time.monotonic()
        assert server.stop() == 1
        assert time.monotonic() - began < 10 * LIMIT
        assert isinstance(call.exception(timeout=PATIENCE), grpc.RpcError)
    assert "still not stopped after 6.0 seconds" in (tmp_path / "log.txt").read_text()
