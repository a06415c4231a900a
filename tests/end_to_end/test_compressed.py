"""A small message that becomes an enormous one when it is decompressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.processes import PATIENCE, ServerProcess, serving

BOMB = 400 * 1024 * 1024  # bytes; 16 MiB are allowed
MOST_GROWTH = 100 * 1024 * 1024


def processor_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.full
def test_what_decompresses_to_too_much_costs_little(tmp_path: Path) -> None:
    with serving(tmp_path / "log.txt", "--fake") as server:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(server.grpc, options, compression=grpc.Compression.Gzip) as channel:
            call: Any = channel.unary_unary("/beamline.v1.Inference/Translate")
            with pytest.raises(grpc.RpcError):  # the connection is there now
                call(b"\xff", timeout=PATIENCE)
            memory, work = server.resident_bytes(), processor_seconds(server)
            with pytest.raises(grpc.RpcError) as caught:
                call(bytes(BOMB), timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert server.resident_bytes() - memory < MOST_GROWTH
            assert processor_seconds(server) - work < 2  # of 0.05; all of it would take seconds
