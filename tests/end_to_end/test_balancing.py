"""Servers of different speed behind a real Envoy: who gets how many calls, and what becomes of a refusal."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.documents.pages import blocks
from tests.support.envoy import Envoy, envoy
from tests.support.processes import PATIENCE, ServerProcess, serving

REQUEST = pb.TranslateRequest(inputs=[pb.Input(text="abcdefgh")])
CALLERS = 16
WINDOW = 400  # calls
WINDOWS = 60  # in which a balancer must have learned who is slow; only a failure takes so many
FAIR = 1 / 3
KIND = "type.googleapis.com/envoy.extensions.load_balancing_policies"
ROUND_ROBIN = {
    "policies": [
        {
            "typed_extension_config": {
                "name": "envoy.load_balancing_policies.round_robin",
                "typed_config": {"@type": f"{KIND}.round_robin.v3.RoundRobin"},
            }
        }
    ]
}


def weighted() -> dict[str, Any]:
    """As docs/balancing.md has it."""
    found = [yaml.safe_load(block.content) for block in blocks("docs/balancing.md") if block.language == "yaml"]
    [policy] = [each["load_balancing_policy"] for each in found if "load_balancing_policy" in each]
    return policy  # type: ignore[no-any-return]


@contextmanager
def fleet(
    folder: Path, *options: tuple[str, ...], policy: dict[str, Any] | None = None, retries: bool = True
) -> Iterator[tuple[list[ServerProcess], Envoy]]:
    """A server for each of the options."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(folder / f"log{number}.txt", "--fake", "--load-reports", *each))
            for number, each in enumerate(options)
        ]
        grpc_ports, http_ports = [_port(each.grpc) for each in servers], [_port(each.http) for each in servers]
        yield servers, stack.enter_context(envoy(folder, grpc_ports, http_ports, policy=policy, retries=retries))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def call(stub: beamline_pb2_grpc.InferenceStub, count: int, at_once: int = CALLERS) -> Counter[str]:
    """So many calls, each caller's next one when it is answered; what became of them."""
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            try:
                await stub.Translate(REQUEST, timeout=PATIENCE)
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return outcomes


def answered(servers: list[ServerProcess]) -> list[float]:
    method = "/beamline.v1.Inference/Translate"
    return [server.metrics()("beamline_calls_total", method=method, code="OK") for server in servers]


async def shares(servers: list[ServerProcess], stub: beamline_pb2_grpc.InferenceStub) -> list[float]:
    before = await asyncio.to_thread(answered, servers)
    assert await call(stub, WINDOW) == {"OK": WINDOW}
    after = await asyncio.to_thread(answered, servers)
    return [(one - other) / WINDOW for one, other in zip(after, before, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["round robin", "least request", "weighted by load reports"])
async def test_a_slow_server_gets_fewer_calls(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"round robin": ROUND_ROBIN, "least request": None, "weighted by load reports": weighted()}[name]
    fast, slow = ("--fake-step-ms", "5"), ("--fake-step-ms", "20")
    with fleet(tmp_path, fast, fast, slow, policy=policy) as (servers, balancer):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{balancer.port}") as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            found = [await shares(servers, stub)]
            while name != "round robin" and found[-1][2] > 0.7 * FAIR and len(found) < WINDOWS:
                found.append(await shares(servers, stub))
            found.append(await shares(servers, stub))
    with capsys.disabled():
        text = ", ".join(f"{share:.1%}" for share in found[-1])
        print(f"\n{name}: {text} of the calls, the last server four times as slow (after {len(found) - 1} x {WINDOW})")
    if name == "round robin":
        assert found[-1] == pytest.approx([FAIR] * 3, abs=0.02)
    else:
        assert found[-1][2] < 0.7 * FAIR
        assert min(found[-1][:2]) > FAIR


@pytest.mark.full
@pytest.mark.parametrize("name", ["round_robin", "weighted_round_robin"])
async def test_clients_can_balance_themselves(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the service configurations of docs/balancing.md."""
    found = [block.content for block in blocks("docs/balancing.md") if block.language == "json"]
    plain = [each for each in found if "retryPolicy" not in each]
    [configuration] = [each for each in plain if name in json.loads(each)["loadBalancingConfig"][0]]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(tmp_path / f"log{step}", "--fake", "--load-reports", "--fake-step-ms", step))
            for step in ("5", "20")
        ]
        target = "ipv4:" + ",".join(server.grpc for server in servers)
        async with grpc.aio.insecure_channel(target, options=[("grpc.service_config", configuration)]) as channel:
            stub = beamline_pb2_grpc.InferenceStub(channel)
            seen = [await shares(servers, stub)]
            while name != "round_robin" and seen[-1][1] > 0.3 and len(seen) < WINDOWS:
                seen.append(await shares(servers, stub))
            seen.append(await shares(servers, stub))
    with capsys.disabled():
        print(f"\n{name} of gRPC: {seen[-1][0]:.1%}, {seen[-1][1]:.1%}, the last server four times as slow")
    if name == "round_robin":
        assert seen[-1] == pytest.approx([0.5, 0.5], abs=0.02)
    else:
        assert seen[-1][1] < 0.3


@pytest.mark.full
async def test_a_refusal_is_tried_elsewhere_within_a_budget(tmp_path: Path) -> None:
    """One server holds two requests and no more. Without retries its callers see that; with them another answers."""
    small = ("--fake-step-ms", "10", "--fake-slots", "1", "--max-queue", "1")
    large = ("--fake-step-ms", "1")
    found = {}
    for retries, at_once in ((False, 4), (True, 4), (True, 48)):
        (folder := tmp_path / f"{retries}{at_once}").mkdir()
        with fleet(folder, small, large, large, policy=ROUND_ROBIN, retries=retries) as (servers, balancer):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{balancer.port}") as channel:
                outcomes = await call(beamline_pb2_grpc.InferenceStub(channel), WINDOW, at_once)
            retried = balancer.count("cluster.grpc.upstream_rq_retry")
            refused = servers[0].metrics()("beamline_refused_total", reason="overloaded")
        found[retries, at_once] = outcomes
        assert refused > 0
        assert (retried > 0) == retries
    assert set(found[False, 4]) == {"OK", "RESOURCE_EXHAUSTED"}
    assert found[True, 4] == {"OK": WINDOW}  # never more than three retries at once, which are always allowed
    assert found[True, 48]["RESOURCE_EXHAUSTED"] > 0, "there is no budget"
