from __future__ import annotations

import asyncio
import shutil
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from beamline.protos import beamline_pb2 as pb
from beamline.serving.config import ServeConfig
from beamline.serving.errors import BeamlineError, ModelError, ModelNotFound
from beamline.serving.lifecycle import Phase
from beamline.serving.models.loader import Observe
from beamline.serving.server import Server
from tests.serving.disk import write_version
from tests.serving.doubles import (
    WAIT_SECONDS,
    EngineDouble,
    EngineDoubles,
    connected,
    eventually,
    makers,
    running,
    started,
)

ONE = pb.TranslateRequest(inputs=[pb.Input(text="a")])
ANY_PORT = ServeConfig(grpc_port=0, metrics_port=0)


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_http_answers_beside_grpc() -> None:
    async with running(EngineDouble()) as server, connected(server) as stub:
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz") == (200, "ok")
        await stub.Translate(ONE)
        _, metrics = await asyncio.to_thread(get, server.metrics_address, "/metrics")
    assert 'beamline_calls_total{code="OK",method="/beamline.v1.Inference/Translate"} 1.0' in metrics


async def test_health_says_loading_while_models_load() -> None:
    engine, began, may_load = EngineDouble(), threading.Event(), threading.Event()

    def slowly(observe: Observe) -> EngineDouble:
        began.set()
        assert may_load.wait(20)
        return engine

    server = Server(replace(ANY_PORT, fake=True), replace(makers(engine), fake=slowly))
    starting = asyncio.ensure_future(server.start())
    assert await asyncio.to_thread(began.wait, WAIT_SECONDS)
    assert await asyncio.to_thread(get, server.metrics_address, "/healthz") == (503, "loading")
    may_load.set()
    await starting
    try:
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz") == (200, "ok")
    finally:
        await server.stop()


async def test_a_drain_refuses_newcomers_and_finishes_who_is_inside() -> None:
    engine = EngineDouble(held=True)
    async with running(engine) as server, connected(server) as stub:
        inside = asyncio.ensure_future(stub.Translate(ONE))
        await engine.until(lambda: len(engine.submitted) == 1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(ONE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "draining" in (caught.value.details() or "")
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz") == (503, "draining")
        assert not draining.done()
        engine.release()
        assert await draining
        assert (await inside).translations[0].hypotheses[0].text == "a"
        assert engine.draining


async def test_a_server_that_leaves_says_so_and_still_answers() -> None:
    async with running(EngineDouble(), drain_delay_seconds=WAIT_SECONDS) as server, connected(server) as stub:
        leaving = asyncio.ensure_future(server.leave())
        await asyncio.sleep(0)
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz") == (503, "leaving")
        assert (await asyncio.to_thread(get, server.metrics_address, "/healthz/live"))[0] == 200
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await stub.Translate(ONE)).translations[0].hypotheses[0].text == "a"
        server.failed.set()  # nothing to wait for any more
        await leaving


async def test_late_calls_are_refused_with_a_hint_and_counted_and_none_is_lost() -> None:
    """Callers who call again as soon as they are refused, until there is nothing to connect to."""
    refusals: list[grpc.aio.AioRpcError] = []

    async def call_again_and_again(server: Server) -> None:
        async with connected(server, [("grpc.use_local_subchannel_pool", 1)]) as stub:
            while True:
                try:
                    await stub.Translate(ONE)
                except grpc.aio.AioRpcError as error:
                    if "failed to connect" in (error.details() or ""):
                        return
                    refusals.append(error)

    async with running(EngineDouble()) as server:
        callers = [asyncio.ensure_future(call_again_and_again(server)) for _ in range(5)]
        calls = server.metrics.registry.get_sample_value
        method = "/beamline.v1.Inference/Translate"
        await eventually(lambda: bool(calls("beamline_calls_total", {"method": method, "code": "OK"})))
        assert await server.drain()
        await eventually(lambda: len(refusals) > 10)
        await server.stop()
        await asyncio.gather(*callers)
        counted = calls("beamline_refused_total", {"reason": "shutting_down"})
    assert {error.code() for error in refusals} == {grpc.StatusCode.UNAVAILABLE}
    assert counted == len(refusals)
    assert all(dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000" for error in refusals)


async def test_a_drain_with_nothing_to_do_is_over_at_once() -> None:
    async with running(EngineDouble()) as server:
        assert await server.drain()


class LostDouble(EngineDouble):
    """Its device is lost, or a step hangs, when a test says so."""

    lost: str | None = None

    def trouble(self, patience: float) -> str | None:
        return self.lost


async def test_a_server_that_failed_is_not_alive_while_it_ends() -> None:
    engine = LostDouble()
    async with running(engine, watchdog_seconds=0.01) as server:
        engine.lost = "the device is lost"
        async with asyncio.timeout(WAIT_SECONDS):
            await server.failed.wait()
        await server.leave()
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz/live") == (503, "failed")
        server.service.refuse()  # as a drain and a stop do first
        assert await asyncio.to_thread(get, server.metrics_address, "/healthz/live") == (503, "failed")


async def test_a_drain_without_a_limit_ends_where_a_step_hangs() -> None:
    engine = LostDouble(held=True)
    async with running(engine, drain_seconds=None, watchdog_seconds=0.01) as server, connected(server) as stub:
        inside = asyncio.ensure_future(stub.Translate(ONE))
        await engine.until(lambda: len(engine.submitted) == 1)
        draining = asyncio.ensure_future(server.drain())
        await eventually(lambda: server.lifecycle.phase is Phase.DRAINING)
        engine.lost = "a step has not ended for 0.01 seconds"
        try:
            async with asyncio.timeout(20):
                assert not await draining
        finally:
            engine.release()  # the thread that waits for it
        assert server.failed.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inside
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_device_that_is_lost_at_the_end_of_a_drain_is_not_overlooked() -> None:
    """Between two looks of the watchdog, which come every second."""
    engine = LostDouble()
    async with running(engine) as server:
        engine.lost = "the device is lost"
        assert not await server.drain()
        assert server.failed.is_set()


async def test_a_drain_gives_up_in_time() -> None:
    engine = EngineDouble(held=True)
    async with running(engine, drain_seconds=0.05) as server, connected(server) as stub:
        inside = asyncio.ensure_future(stub.Translate(ONE))
        await engine.until(lambda: len(engine.submitted) == 1)
        assert not await server.drain()
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await inside
    assert engine.cancelled == [engine.submitted[0].id]


async def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    def never(observe: Observe) -> EngineDouble:
        raise AssertionError("loaded")

    async with running(EngineDouble()) as first:
        for name, address in (("grpc_port", first.grpc_address), ("metrics_port", first.metrics_address)):
            taken = int(address.rpartition(":")[2])
            config = ServeConfig(**{"fake": True, "grpc_port": 0, "metrics_port": 0, name: taken})  # type: ignore[arg-type]
            second = Server(config, replace(makers(EngineDouble()), fake=never))
            option = f"--{name.replace('_', '-')}"
            with pytest.raises(BeamlineError, match=f"can't listen on 127.0.0.1:{taken}.*choose another {option} "):
                await second.start()


async def test_the_newest_of_each_model_is_served_and_broken_ones_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2, 3):
        write_version(tmp_path, "de", version)
    (tmp_path / "de" / "3" / "weights.bin").write_bytes(b"x")
    write_version(tmp_path, "fr", 4)
    (tmp_path / "half" / "1").mkdir(parents=True)
    engines = EngineDoubles()
    server = Server(replace(ANY_PORT, repository=tmp_path, default_model="de"), engines.makers)
    async with started(server), connected(server) as stub:
        response = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="hello world")]))
        other = await stub.Translate(pb.TranslateRequest(model="fr", inputs=[pb.Input(text="world")]))
    assert engines.loaded == [("de", 2), ("fr", 4)]
    assert (response.model, response.version) == ("de", "2")
    assert response.translations[0].hypotheses[0].text == "hello world"
    assert (other.model, other.version) == ("fr", "4")
    problems = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(problems) == 2
    assert any("de/3/weights.bin" in problem for problem in problems)
    assert any("half/1/manifest.json" in problem for problem in problems)


async def test_a_default_that_is_not_there_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    write_version(tmp_path, "de")
    engines = EngineDoubles()
    with pytest.raises(ModelNotFound, match="the default model 'nope' is not among the repository's: de"):
        await Server(replace(ANY_PORT, repository=tmp_path, default_model="nope"), engines.makers).start()
    assert engines.loaded == []


async def test_all_versions_on_request(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path, "de", version)
    server = Server(replace(ANY_PORT, repository=tmp_path, all_versions=True), EngineDoubles().makers)
    async with started(server), connected(server) as stub:
        old = await stub.Translate(pb.TranslateRequest(version="1", inputs=[pb.Input(text="hello")]))
        new = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="hello")]))
    assert (old.version, new.version) == ("1", "2")


@pytest.mark.parametrize("broken", [True, False])
async def test_a_repository_without_a_model_is_an_error(tmp_path: Path, broken: bool) -> None:
    if broken:
        folder = write_version(tmp_path, "de")
        (folder / "step.onnx").unlink()
    server = Server(replace(ANY_PORT, repository=tmp_path), EngineDoubles().makers)
    with pytest.raises(ModelError, match=r"step.onnx does not exist" if broken else "there is no model in it"):
        await server.start()


@pytest.mark.parametrize("layout", ["repository", "model", "version", "elsewhere"])
@pytest.mark.parametrize("name", [None, "other"])
async def test_a_repository_may_be_one_model_or_one_version(tmp_path: Path, layout: str, name: str | None) -> None:
    """As KServe's storage initializer leaves them in /mnt/models."""
    version = write_version(tmp_path / "repository", "de", 2)
    elsewhere = tmp_path / "mnt" / "models"
    shutil.copytree(version, elsewhere)
    root = {
        "repository": version.parents[1],
        "model": version.parent,
        "version": version,
        "elsewhere": elsewhere,
    }[layout]
    doubles = EngineDoubles()
    config = replace(ANY_PORT, repository=root, model_name=name)
    async with started(Server(config, doubles.makers)) as server:
        assert server.manager is not None
        assert [(each.name, each.version, each.state.name) for each in server.manager.index()] == [
            (name or "de", "2", "READY")
        ]
        async with connected(server) as stub:
            request = pb.TranslateRequest(model=name or "de", inputs=[pb.Input(text="a")])
            assert (await stub.Translate(request)).model == (name or "de")
        await server.manager.refresh_all()
        assert len(doubles.loaded) == 1  # nothing has changed


async def test_a_name_is_for_one_model(tmp_path: Path) -> None:
    for model in ("de", "fr"):
        write_version(tmp_path, model)
    server = Server(replace(ANY_PORT, repository=tmp_path, model_name="other"), EngineDoubles().makers)
    with pytest.raises(ModelError, match="several models"):
        await server.start()


async def test_a_call_to_the_operators_port_is_told_where_to_go() -> None:
    async with running(EngineDouble()) as server:
        code, said = await asyncio.to_thread(get, server.metrics_address, "/v1/translate")
        host, _, port = server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        as_grpc = await reader.read()
        writer.close()
    assert code == 404
    assert "calls go to --http-port (8000)" in said
    assert b"gRPC has a port of its own" in as_grpc


async def test_the_real_fake_engine_echoes_through_everything() -> None:
    text = "Hello. Größe 😀!"
    server = Server(replace(ANY_PORT, fake=True))
    async with started(server), connected(server) as stub:
        response = await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text=text)]))
        assert response.translations[0].hypotheses[0].text == text
        assert await server.drain()
