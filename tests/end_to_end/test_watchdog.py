"""A device that is lost, or hangs: everyone is answered, health checks fail, and the process ends with an error."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc as rpc
from tests.support.processes import PATIENCE, ROOT, environment, eventually

# The fake device, which fails at its third step as a real one would; a device that is lost can't be reset either.
_SERVE = """
import sys, threading
from beamline.serving.backends.fake import FakeBackend
from beamline.serving.commands import serve
from beamline.serving.cli import main

def lost(*arguments):
    raise RuntimeError("device lost")

def hangs(*arguments):
    print("a step hangs", file=sys.stderr, flush=True)
    threading.Event().wait()

run, steps = FakeBackend.run, []

def third(self, inputs):
    steps.append(None)
    return {fault}() if len(steps) > 2 else run(self, inputs)

FakeBackend.run = third
FakeBackend.zero = lost
sys.exit(main(sys.argv[1:], {{"serve": lambda: serve}}))
"""


@contextmanager
def served(fault: str, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    ports = ["--grpc-port", "0", "--metrics-port", "0", "--http-port", "0"]
    command = [sys.executable, "-c", _SERVE.format(fault=fault), "serve", "--fake", *ports, *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment()
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready "), log.read_text()
            yield process, dict(word.split("=") for word in ready.split()[1:])["grpc"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("fault", "arguments", "said"),
    [
        ("lost", (), "the device of fake is lost"),
        ("hangs", ("--watchdog-seconds", "0.2"), "a step has not ended for 0.2 seconds"),
    ],
)
def test_calls_are_answered_and_the_process_ends(
    fault: str, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    with served(fault, log, *arguments) as (process, address), grpc.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)

        def ask(number: int) -> grpc.StatusCode:
            try:
                stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="a long text " * 4)]))  # no deadline
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(16) as pool:
            codes = list(pool.map(ask, range(16)))
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
        assert process.wait(timeout=PATIENCE) == 1
    assert said in log.read_text()


@pytest.mark.parametrize(
    ("fault", "arguments", "said"),
    [
        ("lost", ("--drain-delay", "600"), "leaving"),
        ("hangs", ("--drain-delay", "0", "--watchdog-seconds", "5"), "a step hangs"),
    ],
)
def test_a_failure_while_the_server_leaves_or_drains_ends_the_process(
    fault: str, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Where the drain has no limit, too."""
    log = tmp_path / "log.txt"
    with (
        served(fault, log, "--drain-seconds", "none", *arguments) as (process, address),
        grpc.insecure_channel(address) as channel,
    ):

        def ask() -> Any:  # a call that runs
            request = pb.TranslateRequest(inputs=[pb.Input(text="a long text")])
            return rpc.InferenceStub(channel).Translate.future(request)

        if fault == "lost":
            process.send_signal(signal.SIGTERM)
            eventually(lambda: said in log.read_text(), said)
            call = ask()
        else:
            call = ask()
            eventually(lambda: said in log.read_text(), said)
            process.send_signal(signal.SIGTERM)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=PATIENCE) == 1
    assert "refusing all calls" in log.read_text()
