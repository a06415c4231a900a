"""Servers that are stopped one after the other behind a real load balancer: no call fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.envoy import envoy, free_ports
from tests.support.processes import PATIENCE, ServerProcess, eventually, serving

STOPS = 10
DELAY = 5  # seconds; what --drain-delay is by default
TEXT = "abcdefgh"


class Callers:
    """Over gRPC and HTTP, each again as soon as it is answered. Counts what became of the calls."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port = port
        self._over = threading.Event()
        self._threads = [threading.Thread(target=asyncio.run, args=[self._grpc()])]
        self._threads += [threading.Thread(target=self._http) for _ in range(2)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    async def _grpc(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(self._calls(stub) for _ in range(8)))

    async def _calls(self, stub: beamline_pb2_grpc.InferenceStub) -> None:
        while not self._over.is_set():
            try:
                reply = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text=TEXT)]), timeout=PATIENCE)
                right = reply.translations[0].hypotheses[0].text == TEXT
                self.outcomes["grpc OK" if right else "grpc wrong"] += 1
            except grpc.aio.AioRpcError as error:
                self.outcomes[f"grpc {error.code().name} {error.details()}"] += 1

    def _http(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        body = json.dumps({"inputs": [{"text": TEXT}]})
        while not self._over.is_set():
            try:
                connection.request("POST", "/v1/translate", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
                right = answer.status == 200 and TEXT in content.decode()
                self.outcomes["http OK" if right else f"http {answer.status} {content[:100]!r}"] += 1
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.outcomes[f"http {error!r}"] += 1
        connection.close()


@pytest.mark.full
def test_no_call_fails_while_servers_are_stopped_one_after_the_other(tmp_path: Path) -> None:
    ports = free_ports(4)
    grpc_ports, http_ports = ports[:2], ports[2:]
    with ExitStack() as everything:

        def start(index: int) -> tuple[ExitStack, ServerProcess]:
            stack = everything.enter_context(ExitStack())
            options = ("--grpc-port", str(grpc_ports[index]), "--http-port", str(http_ports[index]))
            delay = ("--drain-delay", str(DELAY))
            log = tmp_path / f"log{index}-{time.monotonic()}.txt"
            return stack, stack.enter_context(serving(log, "--fake", "--fake-step-ms", "2", *options, *delay))

        running = [start(0), start(1)]
        balancer = everything.enter_context(envoy(tmp_path, grpc_ports, http_ports, retries=False))
        # What is no gRPC goes to the HTTP port.
        for path in ("/v2/health/ready", "/v2", "/v1/models", "/healthz/ready"):
            with urllib.request.urlopen(f"http://127.0.0.1:{balancer.port}{path}", timeout=PATIENCE) as answer:
                assert answer.status == 200, path
        with Callers(balancer.port) as callers:
            for number in range(STOPS):
                index = number % 2
                stack, server = running[index]
                assert server.stop() == 0
                stack.close()
                running[index] = start(index)
                eventually(balancer.healthy, "Envoy finds the server that was started anew")
    failed = {outcome: count for outcome, count in callers.outcomes.items() if not outcome.endswith(" OK")}
    assert not failed
    assert callers.outcomes["grpc OK"] > 100 * STOPS
    assert callers.outcomes["http OK"] > 10 * STOPS
