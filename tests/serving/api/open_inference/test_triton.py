"""tritonclient from PyPI, unchanged: in a process of its own, and in one process with our client and server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from tests.serving.api.open_inference import triton_session
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDoubles, connected, started

FAKE = ServeConfig(fake=True, grpc_port=0, metrics_port=0)


async def test_in_its_own_process() -> None:
    async with started(Server(FAKE)) as server:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-P", triton_session.__file__, server.grpc_address, "fake"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


async def test_in_one_process_with_our_own_client() -> None:
    async with started(Server(FAKE)) as server, connected(server) as stub:
        before = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="hello")]))
        await asyncio.to_thread(triton_session.session, server.grpc_address, "fake")
        after = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="hello")]))
    assert before.translations[0].hypotheses == after.translations[0].hypotheses


async def test_a_language_model() -> None:
    async with started(Server(FAKE)) as server:
        await asyncio.to_thread(triton_session.generation, server.grpc_address, "fake-lm")


async def test_the_repository_is_managed(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "de", 2)
    (write_version(tmp_path, "broken", 1) / "weights.bin").write_bytes(b"short")
    engines = EngineDoubles()
    config = replace(FAKE, fake=False, repository=tmp_path)
    async with started(Server(config, engines.makers)) as server:
        await asyncio.to_thread(triton_session.repository, server.grpc_address, "de")
    assert engines.loaded == [("de", 2), ("de", 1), ("de", 2)]
