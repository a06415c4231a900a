"""Loads that hang, or whose callers don't wait: they are finished or given up, and the index says which."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from beamline.protos import open_inference_pb2 as oip
from beamline.serving.commands import serve
from beamline.serving.config import ServeConfig
from beamline.serving.contract.manifest import Manifest
from beamline.serving.errors import ModelUnavailable
from beamline.serving.models.loader import Observe
from beamline.serving.models.loading import LoadingThread, LoadTooLong
from beamline.serving.models.manager import ModelManager, State
from beamline.serving.models.settings import ModelSettings
from beamline.serving.server import Server
from tests.serving.disk import write_version
from tests.serving.doubles import WAIT_SECONDS, EngineDouble, EngineDoubles, eventually, started
from tests.support.processes import environment

ANY_PORT = ServeConfig(grpc_port=0, metrics_port=0)


class HangingEngines(EngineDoubles):
    """Loading the model `slow` waits until a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.allowed = threading.Event(), threading.Event()

    def _load(self, folder: Path, manifest: Manifest, settings: ModelSettings, observe: Observe) -> EngineDouble:
        if manifest.name == "slow":
            self.begun.set()
            assert self.allowed.wait(WAIT_SECONDS)
        return super()._load(folder, manifest, settings, observe)


@asynccontextmanager
async def serving(
    root: Path, engines: HangingEngines, **settings: object
) -> AsyncIterator[tuple[Server, ModelManager]]:
    config = replace(ANY_PORT, repository=root, **settings)  # type: ignore[arg-type]
    async with started(Server(config, engines.makers)) as server:
        assert server.manager is not None
        try:
            yield server, server.manager
        finally:
            engines.allowed.set()


def state(manager: ModelManager, name: str) -> tuple[State, str]:
    (line,) = (line for line in manager.index() if line.name == name)
    return line.state, line.reason


async def load(server: Server, name: str, timeout: float) -> None:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryModelLoad",
            oip.RepositoryModelLoadRequest.SerializeToString,
            oip.RepositoryModelLoadResponse.FromString,
        )
        await call(oip.RepositoryModelLoadRequest(model_name=name), timeout=timeout)


async def test_a_load_outlives_its_caller(tmp_path: Path) -> None:
    engines = HangingEngines()
    write_version(tmp_path, "de")
    async with serving(tmp_path, engines) as (server, manager):
        write_version(tmp_path, "slow")
        caller = asyncio.create_task(load(server, "slow", timeout=WAIT_SECONDS))
        assert await asyncio.to_thread(engines.begun.wait, WAIT_SECONDS)
        caller.cancel()
        # The server has seen that it left.
        await eventually(lambda: b'code="CANCELLED"' in server.metrics.exposition())
        assert state(manager, "slow") == (State.LOADING, "")
        engines.allowed.set()
        await eventually(lambda: state(manager, "slow") == (State.READY, ""))
        await load(server, "slow", timeout=WAIT_SECONDS)  # there is nothing left to do
        assert engines.loaded.count(("slow", 1)) == 1


async def test_a_load_that_hangs_is_given_up(tmp_path: Path) -> None:
    engines = HangingEngines()
    write_version(tmp_path, "de")
    async with serving(tmp_path, engines, load_seconds=0.3) as (server, manager):
        write_version(tmp_path, "slow")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await load(server, "slow", timeout=WAIT_SECONDS)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "took longer than 0.3 seconds, and was given up" in (failed.value.details() or "")
        assert state(manager, "slow")[0] is State.UNAVAILABLE
        assert server.metrics.registry.get_sample_value("beamline_model_loads_total", {"outcome": "given_up"}) == 1
        assert "was given up" in state(manager, "slow")[1]
        # Others load meanwhile, in a thread of their own.
        write_version(tmp_path, "fr")
        await load(server, "fr", timeout=WAIT_SECONDS)
        assert state(manager, "fr") == (State.READY, "")
        # What comes of it, late, is dropped; and it can be tried again.
        engines.allowed.set()
        await eventually(lambda: ("slow", 1) in engines.loaded)
        assert state(manager, "slow")[0] is State.UNAVAILABLE
        await load(server, "slow", timeout=WAIT_SECONDS)
        assert state(manager, "slow") == (State.READY, "")


async def test_what_hangs_at_the_start_is_listed_and_the_others_are_served(tmp_path: Path) -> None:
    engines = HangingEngines()
    write_version(tmp_path, "de")
    write_version(tmp_path, "slow")
    async with serving(tmp_path, engines, load_seconds=0.3) as (_, manager):
        assert state(manager, "de") == (State.READY, "")
        assert "was given up" in state(manager, "slow")[1]


async def test_a_server_may_be_ended_while_a_load_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = HangingEngines()
    write_version(tmp_path, "slow")
    monkeypatch.setattr(serve, "Server", lambda config: Server(config, engines.makers))
    monkeypatch.setattr(serve, "_exit_after", lambda seconds: None)  # it would end the tests
    ending = asyncio.create_task(serve._serve(replace(ANY_PORT, repository=tmp_path)))
    assert await asyncio.to_thread(engines.begun.wait, WAIT_SECONDS)
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(ending, WAIT_SECONDS) == 0
    engines.allowed.set()


@pytest.mark.parametrize("name", ["manifest.json", "weights.bin", "step.onnx", "tokenizer.json", "../serving.toml"])
async def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path, name: str) -> None:
    write_version(tmp_path, "de")
    folder = write_version(tmp_path, "piped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    async with serving(tmp_path, HangingEngines()) as (_, manager):
        assert state(manager, "de") == (State.READY, "")
        found, reason = state(manager, "piped")
        assert found is State.UNAVAILABLE
        assert f"{Path(name).name} can't be read: it is a named pipe, and must be a regular file" in reason
        with pytest.raises(ModelUnavailable, match="named pipe"):
            await manager.load("piped")


async def test_changed_weights_are_noticed_behind_an_unchanged_manifest(tmp_path: Path) -> None:
    folder = write_version(tmp_path, "de")
    async with serving(tmp_path, HangingEngines()) as (_, manager):
        content = (folder / "weights.bin").read_bytes()
        (folder / "weights.bin").write_bytes(content[::-1])
        await manager.refresh(["de"])
        assert state(manager, "de")[0] is State.READY  # as it was loaded
        assert "weights.bin is corrupt" in state(manager, "de")[1]
        (folder / "weights.bin").write_bytes(content)
        await manager.refresh(["de"])
        assert state(manager, "de") == (State.READY, "")


def test_what_hangs_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from beamline.serving.models.loading import LoadTooLong, LoadingThread\n"
        "async def main():\n"
        "    try:\n"
        "        await LoadingThread(0.05).run(threading.Event().wait)\n"
        "    except LoadTooLong:\n"
        "        print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    assert done.stdout == "given up\n"


class Model:
    """Says on which thread it ended."""

    def __init__(self, ended: list[str]) -> None:
        weakref.finalize(self, lambda: ended.append(threading.current_thread().name))


async def test_a_model_that_came_too_late_ends_on_the_loading_thread() -> None:
    thread, let, ended = LoadingThread(0.05), threading.Event(), list[str]()

    def load() -> Model:
        let.wait(WAIT_SECONDS)
        return Model(ended)

    with pytest.raises(LoadTooLong):
        await thread.run(load)
    let.set()
    await eventually(lambda: bool(ended))
    assert ended == ["loading"]


async def test_what_waits_behind_a_load_that_hangs_is_done_when_that_is_given_up() -> None:
    thread, let, ended = LoadingThread(0.2), threading.Event(), list[str]()
    hung = asyncio.ensure_future(thread.run(let.wait, WAIT_SECONDS))
    await asyncio.sleep(0)  # it has begun
    thread.drop([Model(ended)])
    with pytest.raises(LoadTooLong):
        await hung
    await eventually(lambda: bool(ended))
    let.set()
