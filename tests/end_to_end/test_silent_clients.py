"""Clients that are still connected, but do nothing any more."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import PATIENCE, ROOT, ServerProcess, eventually, serving

READS_A_STREAM = """
import sys, grpc
from beamline.protos import beamline_pb2 as pb, beamline_pb2_grpc
stub = beamline_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[1]))
for reply in stub.TranslateStream(pb.TranslateRequest(inputs=[pb.Input(text="b" * 1000)])):
    print("read", flush=True)
"""


@contextmanager
def reading(address: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has read something of a stream that takes minutes."""
    command = [sys.executable, "-c", READS_A_STREAM, address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == "read\n"
            yield client
        finally:
            client.kill()


def cancelled(server: ServerProcess) -> float:
    return server.metrics()("beamline_calls_total", code="CANCELLED")


@pytest.mark.full
def test_a_client_that_was_stopped_is_noticed(tmp_path: Path) -> None:
    """Its machine still acknowledges what it is sent; only pings tell."""
    arguments = ("--fake", "--fake-step-ms", "500", "--keepalive-seconds", "1")
    with (
        serving(tmp_path / "log.txt", *arguments) as server,
        reading(server.grpc) as client,
        reading(server.grpc) as other,
    ):
        client.send_signal(signal.SIGSTOP)
        eventually(lambda: cancelled(server) == 1, "the stopped client's call is given up")
        eventually(lambda: server.metrics()("beamline_active_slots") == 1, "its slot is free")
        assert other.poll() is None
        assert other.stdout is not None
        assert other.stdout.readline() == "read\n"
        other.kill()
        eventually(lambda: cancelled(server) == 2, "the other one's, too")


FEW = 256  # file descriptors


def limit_files() -> None:
    """The hard limit as well, so that the server can't raise it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


@pytest.mark.full
def test_idle_connections_stop_nothing(tmp_path: Path) -> None:
    """Three hundred half requests at each port of a server that may have 256 files open."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "log.txt", "--fake", before=limit_files))
        for address, begun in (
            (server.http, b"POST /v1/translate HTTP/1.1\r\n"),
            (server.grpc, b"PRI * HT"),
            (server.metrics_address, b"GET /metr"),
        ):
            host, _, port = address.rpartition(":")
            for _ in range(300):
                client = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
                client.sendall(begun)
            for http in (server.http, server.metrics_address):
                with urllib.request.urlopen(f"http://{http}/healthz", timeout=PATIENCE) as answer:
                    assert answer.status == 200
            with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answered = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE, wait_for_ready=True)
                assert answered.status == health_pb2.HealthCheckResponse.SERVING
        assert server.metrics()("beamline_refused_total", reason="idle_connection") > 300
    log = (tmp_path / "log.txt").read_text()
    assert "too many connections" in log
    assert "Traceback" not in log
    assert len(log) < 10_000
