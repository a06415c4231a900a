"""gRPC's own round robin over a name: a server that came later is found because servers end connections now and then;
and retries, both by the service configurations of docs/balancing.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
from tests.documents.pages import blocks
from tests.end_to_end.test_balancing import answered
from tests.support.envoy import free_ports
from tests.support.processes import PATIENCE, ROOT, ServerProcess, environment, eventually, serving

pytestmark = pytest.mark.full

REQUEST = pb.TranslateRequest(inputs=[pb.Input(text="abc")])
# Calls one after the other, until its standard input ends. gRPC looks a name up every 30 seconds at most; here, every
# second.
_CLIENT = """
import select, sys, grpc
from beamline.protos import beamline_pb2 as pb
from beamline.protos.beamline_pb2_grpc import InferenceStub
target, configuration = sys.argv[1:]
options = [("grpc.service_config", configuration), ("grpc.dns_min_time_between_resolutions_ms", 1000)]
with grpc.insecure_channel(target, options=options) as channel:
    stub = InferenceStub(channel)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="abc")]), timeout=60)
"""


def configuration(retries: bool) -> str:
    """The first of the page that has retries, or none."""
    found = [block.content for block in blocks("docs/balancing.md") if block.language == "json"]
    return next(each for each in found if ("methodConfig" in json.loads(each)) == retries)


def server(stack: ExitStack, log: Path, port: int, *options: str) -> ServerProcess:
    return stack.enter_context(serving(log, "--fake", "--fake-step-ms", "1", "--grpc-port", str(port), *options))


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, as root")
@pytest.mark.parametrize("aged", [True, False])
def test_a_server_that_came_later_is_found_when_connections_are_old(tmp_path: Path, aged: bool) -> None:
    """The client has a file of names of its own, in which the name gets a second address. No call fails."""
    [port] = free_ports(1)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 beamline-headless\n")
    age = ("--max-connection-age", "2") if aged else ()
    command = [sys.executable, "-c", _CLIENT, f"dns:///beamline-headless:{port}", configuration(retries=False)]
    inside = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh", *command]
    with ExitStack() as stack:
        servers = [server(stack, tmp_path / host, port, "--host", host, *age) for host in ("127.0.0.1", "127.0.0.2")]
        client = stack.enter_context(
            subprocess.Popen(
                inside, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
            )
        )
        eventually(lambda: answered(servers)[0] > 20, "the first one answers")
        assert answered(servers)[1] == 0
        with hosts.open("a") as file:
            file.write("127.0.0.2 beamline-headless\n")
        before = answered(servers)[0]
        if aged:
            eventually(lambda: answered(servers)[1] > 20, "the second one is found")
        else:
            eventually(lambda: answered(servers)[0] > before + 200, "two hundred calls more")
        found = answered(servers)
        _, errors = client.communicate("\n", timeout=PATIENCE)
        assert client.returncode == 0, errors
    assert (found[1] > 0) == aged


def test_the_documented_retries_hide_a_server_that_refuses(tmp_path: Path) -> None:
    ports = free_ports(2)
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    failed = {}
    with ExitStack() as stack:
        server(stack, tmp_path / "small", ports[0], "--fake-slots", "1", "--max-queue", "1", "--fake-step-ms", "20")
        server(stack, tmp_path / "large", ports[1])
        for retries in (False, True):
            options = [("grpc.service_config", configuration(retries))]
            with grpc.insecure_channel(target, options=options) as channel:
                stub = InferenceStub(channel)
                outcomes: Counter[str] = Counter()
                for _ in range(20):
                    running = [stub.Translate.future(REQUEST, timeout=PATIENCE) for _ in range(6)]
                    outcomes.update("OK" if each.exception() is None else each.code().name for each in running)
            assert set(outcomes) <= {"OK", "RESOURCE_EXHAUSTED"}
            failed[retries] = 120 - outcomes["OK"]
    print(f"of 120 calls {failed[False]} failed without retries, {failed[True]} with them")
    assert failed[False] > 10
    assert failed[True] < failed[False] / 3
