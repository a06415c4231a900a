from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.commands import serve
from beamline.serving.config import ServeConfig, TextLimits
from beamline.serving.errors import BeamlineError
from beamline.serving.security.tls import TlsFiles

ROOT = Path(__file__).parents[3]


def parsed(*arguments: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_of(parser.parse_args(arguments))


def test_defaults_are_those_of_the_config() -> None:
    assert parsed("--fake") == ServeConfig(fake=True, http_port=8000)


def test_every_option_arrives() -> None:
    line = (
        "--repo r --host 0.0.0.0 --grpc-port 1 --metrics-port 0 --threads 3 --max-slots 4 --max-queue 5 "
        "--default-model m --all-versions --load a --load b/2 --watch 3 --drain-seconds 6 --drain-delay 7 "
        "--keepalive-seconds 13 --max-connections 11 --max-connections-per-address 12 "
        "--fake-step-ms 2.5 --fake-slots 7 "
        "--http-port 2 --max-texts 8 --max-message-mib 1 --no-early-refusal --max-calls-per-client 9 "
        "--prompt-slowdown 4 "
        "--tls-cert c --tls-key k --tls-client-ca a --tokens t --metrics-need-token"
    )
    assert parsed(*line.split()) == ServeConfig(
        repository=Path("r"),
        host="0.0.0.0",
        grpc_port=1,
        metrics_port=0,
        default_model="m",
        all_versions=True,
        load=("a", "b/2"),
        watch_seconds=3.0,
        drain_seconds=6.0,
        drain_delay_seconds=7.0,
        keepalive_seconds=13.0,
        max_connections=11,
        max_connections_per_address=12,
        threads=3,
        max_slots=4,
        max_queue=5,
        fake_step_seconds=0.0025,
        fake_slots=7,
        http_port=2,
        text=TextLimits(max_inputs=8),
        max_message_bytes=1024 * 1024,
        early_refusal=False,
        prompt_slowdown=4.0,
        max_calls_per_client=9,
        tls=TlsFiles(Path("c"), Path("k"), Path("a")),
        tokens=Path("t"),
        metrics_need_token=True,
    )


def test_a_drain_is_limited_unless_said() -> None:
    assert parsed("--fake").drain_seconds == 20
    assert parsed("--fake", "--drain-seconds", "none").drain_seconds is None


@pytest.mark.parametrize("line", ["--repo r", "--load m", "--watch"])
def test_the_echo_has_no_repository(line: str) -> None:
    with pytest.raises(BeamlineError, match="--fake serves an echo and no repository"):
        parsed("--fake", *line.split())


@pytest.mark.parametrize("line", ["--tls-cert c", "--tls-key k", "--tls-client-ca a"])
def test_half_of_tls_is_an_error(line: str) -> None:
    with pytest.raises(BeamlineError, match="--tls-"):
        parsed("--fake", *line.split())


def test_the_repository_is_the_folder_model_repo_unless_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BeamlineError, match=r"no folder model_repo is here; give --repo DIR"):
        parsed()
    (tmp_path / "model_repo").mkdir()
    assert parsed().repository == Path("model_repo")
    assert parsed("--watch").watch_seconds == 2.0


@pytest.mark.parametrize(
    "line",
    [
        "--grpc-port 70000",
        "--max-slots 0",
        "--threads -1",
        "--fake-step-ms inf",
        "--watch 0",
        "--drain-seconds inf",
        "--drain-seconds soon",
    ],
)
def test_values_that_make_no_sense_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--fake", *line.split())
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--grpc-port abc", "it is 'abc'; it must be a whole number from 0 to 65535"),
        ("--max-slots 0", "it is 0; it must be a whole number from 1 on"),
        ("--drain-seconds soon", "it is 'soon'; it must be a number of seconds, or none"),
        ("--host 127.0.0.1:9", "it must be an address without a port: --host 127.0.0.1"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(
    line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--fake", *line.split())
    assert capsys.readouterr().err.endswith(f"{sentence}\n")


def test_an_address_of_version_six_is_one() -> None:
    assert parsed("--fake", "--host", "::1").host == parsed("--fake", "--host", "[::1]").host == "::1"


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A real server and the addresses of its ready line."""
    code = "import sys; from beamline.serving.cli import main; from beamline.serving.commands import serve; "
    code += "sys.exit(main(None, {'serve': lambda: serve}))"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "--grpc-port",
        "0",
        "--metrics-port",
        "0",
        "--http-port",
        "0",
        "--drain-delay",
        "0",
        *arguments,
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:
        assert running.stdout is not None
        try:
            ready = dict(word.split("=") for word in running.stdout.readline().split()[1:])
            assert set(ready) == {"grpc", "http", "metrics"}
            yield running, ready
        finally:
            running.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_cleanly(number: signal.Signals) -> None:
    with process("--fake", "--fake-step-ms", "20") as (server, ready):
        for port, path in (("metrics", "/metrics"), ("http", "/openapi.json")):  # named as their options
            with urllib.request.urlopen(f"http://{ready[port]}{path}", timeout=120) as answer:
                assert answer.status == 200
        with grpc.insecure_channel(ready["grpc"]) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            first = stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]))
            assert first.translations[0].hypotheses[0].text == "a"
            running = stub.Translate.future(pb.TranslateRequest(inputs=[pb.Input(text="b" * 50)]))
            # Answered only if the one before it has been taken in: calls of a connection come in order.
            stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="c")]))
            server.send_signal(number)
            assert running.result(timeout=120).translations[0].hypotheses[0].text == "b" * 50
        assert server.wait(timeout=120) == 0


def test_a_hangup_does_not_end_it() -> None:
    with process("--fake") as (server, ready), grpc.insecure_channel(ready["grpc"]) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        server.send_signal(signal.SIGHUP)
        reply = stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a")]))
        assert reply.translations[0].hypotheses[0].text == "a"
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0


def test_a_second_signal_stops_at_once() -> None:
    with (
        process("--fake", "--fake-step-ms", "1000") as (server, ready),
        grpc.insecure_channel(ready["grpc"]) as channel,
    ):
        stub = beamline_pb2_grpc.InferenceStub(channel)
        call = stub.Translate.future(pb.TranslateRequest(inputs=[pb.Input(text="b" * 1000)]))
        with pytest.raises(grpc.RpcError):  # there is no such model; answered behind the other call
            stub.Translate(pb.TranslateRequest(model="nothing"))
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        while "draining" not in server.stderr.readline():
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            call.result(timeout=120)


def test_a_stream_that_outlasts_the_drain_is_cut_off() -> None:
    """With steps of half a second it would run for minutes; it ends with nothing behind its last event."""
    body = json.dumps({"inputs": [{"text": "b" * 1000}]}).encode()
    with process("--fake", "--fake-step-ms", "500", "--drain-seconds", "0.1") as (server, ready):
        host, _, port = ready["http"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=120) as client:
            head = "POST /v1/translate HTTP/1.1\r\nhost: a\r\naccept: text/event-stream\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            received = client.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 ")
            server.send_signal(signal.SIGTERM)
            with suppress(ConnectionResetError):
                while part := client.recv(65536):
                    received += part
        assert b"event: end" not in received
        assert server.wait(timeout=120) == 1
        assert server.stderr is not None
        log = server.stderr.read()
    assert log.index("draining") < log.index("stopped with calls unfinished after 0.1 seconds")
    assert "Traceback" not in log


def test_what_hangs_does_not_keep_the_process() -> None:
    code = "import threading; from beamline.serving.commands import serve; "
    code += "serve._exit_after(0.01); threading.Event().wait()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    assert "still not stopped after 0.01 seconds" in ended.stderr
