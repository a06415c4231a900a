"""What callers see when a server is killed, and that the next one can begin at once, on the same ports."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from tests.support.processes import PATIENCE, eventually, serving


def ports(grpc_address: str, http: str, gateway: str) -> list[str]:
    return [
        word
        for option, address in (("--grpc-port", grpc_address), ("--metrics-port", http), ("--http-port", gateway))
        for word in (option, address.rpartition(":")[2])
    ]


def test_a_killed_server_is_unavailable_and_the_next_one_answers(tmp_path: Path) -> None:
    slow = pb.TranslateRequest(inputs=[pb.Input(text="x" * 4000)])
    good = pb.TranslateRequest(inputs=[pb.Input(text="good")])
    with (
        serving(tmp_path / "first.txt", "--fake", "--fake-step-ms", "50") as first,
        grpc.insecure_channel(first.grpc) as channel,
    ):
        stub = beamline_pb2_grpc.InferenceStub(channel)
        running = stub.Translate.future(slow, timeout=PATIENCE)
        eventually(lambda: first.metrics()("beamline_active_slots") == 1, "it is decoded")
        first.process.kill()
        with pytest.raises(grpc.RpcError) as lost:
            running.result()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        first.process.wait(PATIENCE)
        same = ports(first.grpc, first.metrics_address, first.http)
        # The client's own connection comes back by itself.
        with serving(tmp_path / "second.txt", "--fake", *same) as second:
            assert second.grpc == first.grpc
            answer = stub.Translate(good, timeout=PATIENCE, wait_for_ready=True)
            assert answer.translations[0].hypotheses[0].text == "good"
