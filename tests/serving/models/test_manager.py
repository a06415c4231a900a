"""Load, unload and reload, with engines that a test holds still: no call fails, whatever changes meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import open_inference_pb2 as oip
from beamline.serving.errors import InvalidRequest, ModelError, ModelNotFound, ModelUnavailable
from beamline.serving.models.manager import Listed, State
from beamline.serving.models.repository import _AGAIN as AGAIN
from beamline.serving.models.repository import Repository
from beamline.serving.models.watcher import Watcher
from tests.serving.disk import unreadable, write_version
from tests.serving.doubles import EngineDouble, connected, eventually, running
from tests.serving.models.managed import looked, serving

HELLO = pb.TranslateRequest(model="de", inputs=[pb.Input(text="hello")])


# -- the default -----------------------------------------------------------------------------------------------------


async def test_a_model_may_be_the_default_by_its_settings(tmp_path: Path) -> None:
    for version, name in enumerate(("de", "fr", "nl"), 1):
        write_version(tmp_path, name, version)
    (tmp_path / "fr" / "serving.toml").write_text("default = true")
    async with serving(tmp_path) as this:
        assert await this.version("") == "2"
        (tmp_path / "nl" / "serving.toml").write_text("default = true")
        (tmp_path / "fr" / "serving.toml").unlink()
        await this.manager.refresh(["fr", "nl"])
        assert await this.version("") == "3"
        await this.manager.unload("nl")
        with pytest.raises(grpc.aio.AioRpcError, match="names no model, and there are several: de, fr"):
            await this.version("")
    (tmp_path / "nl" / "serving.toml").write_text("default = true")
    async with serving(tmp_path, default_model="de") as this:
        assert await this.version("") == "1"


async def test_a_default_that_fails_to_load_is_not_replaced_by_another(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "fr", 1)
    (tmp_path / "de" / "serving.toml").write_text("default = true")
    (tmp_path / "de" / "1" / "weights.bin").write_bytes(b"other")
    async with serving(tmp_path) as this:
        assert await this.version("fr") == "1"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await this.version("")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "model 'de' is not served now" in (refused.value.details() or "")
        write_version(tmp_path, "de", 2)
        await this.manager.refresh_all()
        assert await this.version("") == "2"


# -- versions --------------------------------------------------------------------------------------------------------


async def test_a_newer_version_takes_over_and_the_old_one_finishes_what_it_runs(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this, connected(this.server) as stub:
        old = this.engines.made[0]
        old.hold()
        inside = asyncio.ensure_future(stub.Translate(HELLO))
        await old.until(lambda: old.waiting == 1)
        write_version(tmp_path, "de", 2)
        await this.manager.load("de")
        assert (await stub.Translate(HELLO)).version == "2"
        assert this.lines == [("de", "1", State.UNLOADING), ("de", "2", State.READY)]
        assert this.engines.gone == []
        old.release()
        answer = await inside
        assert (answer.version, answer.translations[0].hypotheses[0].text) == ("1", "hello")
        assert this.engines.gone == [("de", 1)]
        assert this.lines == [("de", "2", State.READY)]


async def test_a_long_call_can_still_submit_to_the_version_that_it_began_with(tmp_path: Path) -> None:
    """Its later parts are submitted when the new version has long taken over."""
    write_version(tmp_path, "de", 1)
    long = pb.TranslateRequest(model="de", inputs=[pb.Input(text="hello")] * 200)
    async with serving(tmp_path) as this, connected(this.server) as stub:
        old = this.engines.made[0]
        old.hold()
        inside = asyncio.ensure_future(stub.Translate(long))
        await old.until(lambda: old.waiting == 64)
        write_version(tmp_path, "de", 2)
        await this.manager.load("de")
        old.release()
        answer = await inside
        assert (answer.version, len(answer.translations)) == ("1", 200)
        assert this.engines.gone == [("de", 1)]


async def test_what_has_not_changed_is_not_loaded_again(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        await this.manager.load("de")
        assert this.engines.loaded == [("de", 1)]
        (tmp_path / "de" / "serving.toml").write_text("slots = 3\ncache_entries = 900\n[defaults]\nbeam_size = 2\n")
        await this.manager.load("de")
        assert this.engines.loaded == [("de", 1), ("de", 1)]
        assert (this.engines.settings[-1].slots, this.engines.settings[-1].cache_entries) == (3, 900)
        assert this.engines.made[-1].manifest.defaults.beam_size == 2
        assert this.engines.driven == [this.engines.made[-1]]


async def test_versions_are_pinned_by_the_settings_and_by_a_load(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_version(tmp_path, "de", version)
    (tmp_path / "de" / "serving.toml").write_text("versions = [1, 2]")
    async with serving(tmp_path) as this:
        assert [await this.version(), await this.version(version="1")] == ["2", "1"]
        await this.manager.load("de", (1, 3))
        assert [await this.version(), await this.version(version="1")] == ["3", "1"]
        assert this.engines.loaded == [("de", 2), ("de", 1), ("de", 3)]  # the first was not touched
        await this.manager.load("de", "all")
        assert len(this.engines.driven) == 3
        await this.manager.load("de")  # as the settings say
        assert sorted(engine.manifest.version for engine in this.engines.driven) == [1, 2]


async def test_what_to_begin_with(tmp_path: Path) -> None:
    for name, version in (("de", 1), ("de", 2), ("fr", 1), ("nl", 1)):
        write_version(tmp_path, name, version)
    async with serving(tmp_path, load=("de/1", "fr")) as this:
        assert this.engines.loaded == [("de", 1), ("fr", 1)]
        assert ("nl", "", State.UNAVAILABLE) in this.lines
        assert await this.health("nl") == "NOT_SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await this.version("nl")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "model 'nl' is not served now: it is not loaded"
        await this.manager.load("nl")
        assert await this.version("nl") == "1"
    with pytest.raises(ModelError, match="has no model 'xx'; it has de, fr, nl"):
        async with serving(tmp_path, load=("xx",)):
            pass
    with pytest.raises(ModelError, match="write NAME or NAME/VERSION"):
        async with serving(tmp_path, load=("de/x",)):
            pass


# -- what can't be loaded --------------------------------------------------------------------------------------------


async def test_what_fails_to_load_is_listed_and_the_others_serve(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    (write_version(tmp_path, "fr", 1) / "weights.bin").write_bytes(b"short")  # as when the disk was full
    write_version(tmp_path, "nl", 1)
    (tmp_path / "nl" / "serving.toml").write_text("nonsense = 1")
    async with serving(tmp_path) as this:
        assert this.lines == [
            ("de", "1", State.READY),
            ("fr", "1", State.UNAVAILABLE),
            ("nl", "", State.UNAVAILABLE),
        ]
        assert this.reason("fr", "1") == f"fr/1/weights.bin has 5 bytes; the manifest says 700{AGAIN}"
        assert "nl/serving.toml has unknown keys: nonsense" in this.reason("nl")
        assert [await this.health(name) for name in ("de", "de/1", "fr", "fr/1", "nl", "xx")] == [
            "SERVING",
            "SERVING",
            "NOT_SERVING",
            "NOT_SERVING",
            "NOT_SERVING",
            "NOT_FOUND",
        ]
        with pytest.raises(ModelUnavailable, match=r"fr could not be loaded as asked: .*\(no version of it is"):
            await this.manager.load("fr")


@pytest.mark.parametrize("stray", ["lost+found", "notes", "7.old", "01", "0", "20260101123000"])
async def test_a_folder_that_is_no_version_does_not_fail_a_load(tmp_path: Path, stray: str) -> None:
    write_version(tmp_path, "de", 1)
    (tmp_path / "de" / stray).mkdir()
    (tmp_path / "fr" / stray).mkdir(parents=True)
    async with serving(tmp_path) as this:
        write_version(tmp_path, "de", 2)
        await this.manager.load("de")
        assert await this.version() == "2"
        assert "is not a version" in this.reason("de", stray)
        await this.manager.load("de", (1,))
        with pytest.raises(ModelUnavailable, match=r"is not a version.*no version of it is served"):
            await this.manager.load("fr")  # there is nothing else in it
        with pytest.raises(ModelUnavailable, match="version 4444444444 was asked for"):
            await this.manager.load("de", (4444444444,))


async def test_what_fails_while_it_runs_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asked for it: a call, or the folder's change."""

    def logged() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        caplog.clear()
        return found

    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        (write_version(tmp_path, "de", 2) / "weights.bin").write_bytes(b"short")
        broken = f"de/2 could not be loaded: {tmp_path}/de/2/weights.bin has 5 bytes; the manifest says 700{AGAIN}"
        with pytest.raises(ModelUnavailable):
            await this.manager.load("de")
        assert logged() == [broken]
        await looked(this, watcher)
        assert logged() == [broken]
        with pytest.raises(ModelUnavailable):
            await this.manager.load("de", (7,))
        assert logged()[-1] == "de/7 could not be loaded: version 7 was asked for, but is not in the repository"
        (tmp_path / "de" / "serving.toml").write_text("slotz = 1")
        await looked(this, watcher)
        assert f"de could not be loaded: {tmp_path}/de/serving.toml has unknown keys: slotz" in logged()[-1]
        assert await this.version() == "1"


@pytest.mark.parametrize("error", [ImportError("no runtime here"), RuntimeError("boo"), PermissionError(13, "no")])
async def test_a_change_that_fails_for_whatever_reason_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        bring = this.manager._bring

        async def fails_once(name: str, repository: Repository) -> None:
            if name == "de":
                raise error
            await bring(name, repository)

        monkeypatch.setattr(this.manager, "_bring", fails_once)
        write_version(tmp_path, "de", 2)
        write_version(tmp_path, "fr", 1)
        await looked(this, watcher)
        assert [await this.version(), await this.version("fr")] == ["1", "1"]
        assert this.lines[:2] == [("de", "", State.UNAVAILABLE), ("de", "1", State.READY)]
        assert this.reason("de") == f"it could not be loaded: {error}"
        monkeypatch.undo()
        await this.manager.refresh(["de"])
        assert await this.version() == "2"
        assert "" not in [version for _, version, _ in this.lines]


async def test_a_version_that_can_not_be_looked_into_does_not_keep_the_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(tmp_path, "de", 1)
    unreadable(monkeypatch, write_version(tmp_path, "de", 2))
    unreadable(monkeypatch, write_version(tmp_path, "fr", 1))
    async with serving(tmp_path) as this:
        assert await this.version() == "1"
        assert this.reason("de", "2") == "de/2 can't be read: Permission denied"
        assert this.reason("fr", "1") == "fr/1 can't be read: Permission denied"


async def test_a_broken_new_version_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        (write_version(tmp_path, "de", 2) / "step.onnx").write_bytes(b"half")
        with pytest.raises(ModelUnavailable, match=r"de/2/step.onnx is corrupt.*served now: 1"):
            await this.manager.load("de")
        assert await this.version() == "1"
        assert this.lines == [("de", "1", State.READY), ("de", "2", State.UNAVAILABLE)]
        shutil.rmtree(tmp_path / "de" / "2")
        write_version(tmp_path, "de", 2)
        await this.manager.load("de")
        assert await this.version() == "2"
        assert this.lines == [("de", "2", State.READY)]


async def test_the_same_version_broken_on_disk_goes_on_from_memory(tmp_path: Path) -> None:
    folder = write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        shutil.rmtree(folder)
        (write_version(tmp_path, "de", 1, description="changed") / "weights.bin").write_bytes(b"")
        with pytest.raises(ModelUnavailable, match="0 bytes"):
            await this.manager.load("de")
        assert await this.version() == "1"
        assert this.manager.index() == [
            Listed("de", "1", State.READY, f"de/1/weights.bin has 0 bytes; the manifest says 700{AGAIN}")
        ]


async def test_unknown_names_touch_nothing(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        for name in ("", "nope", "../de", "de/1", str(tmp_path / "de")):
            with pytest.raises(ModelNotFound, match="has no model"):
                await this.manager.load(name)
            with pytest.raises(ModelNotFound):
                await this.manager.unload(name)
        with pytest.raises(ModelUnavailable, match="version 7 was asked for"):
            await this.manager.load("de", (7,))
        assert await this.version() == "1"


# -- unloading -------------------------------------------------------------------------------------------------------


async def test_an_unloaded_model_finishes_and_is_gone(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "fr", 1)
    async with serving(tmp_path) as this, connected(this.server) as stub:
        engine = this.engines.made[0]
        engine.hold()
        inside = asyncio.ensure_future(stub.Translate(HELLO))
        await engine.until(lambda: engine.waiting == 1)
        await this.manager.unload("de")
        assert await this.health("de") == "NOT_SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(HELLO)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        engine.release()
        assert (await inside).version == "1"
        assert this.engines.gone == [("de", 1)]
        assert this.reason("de") == "it was unloaded"
        assert 'beamline_slots{model="de"} 0.0' in this.server.metrics.exposition().decode()
        await this.manager.load("de")
        assert 'beamline_slots{model="de"} 4.0' in this.server.metrics.exposition().decode()
        assert await this.version() == "1"


async def test_a_model_ends_on_the_loading_thread(tmp_path: Path) -> None:
    """To close what it has may wait for a GPU, and on the event loop every call would wait with it."""
    write_version(tmp_path, "de", 1)
    ended: list[str] = []
    async with serving(tmp_path) as this:
        assert await this.version() == "1"
        [served] = this.manager.everything()
        weakref.finalize(served.model, lambda: ended.append(threading.current_thread().name))
        del served
        await this.manager.unload("de")
        await this.manager._thread.run(lambda: None)  # whatever came before is over
        await eventually(lambda: bool(ended))
    assert ended == ["loading"]


async def test_without_its_last_model_a_server_is_not_ready_but_says_why(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    services = ("", "beamline.v1.Inference", "inference.GRPCInferenceService", "de", "de/1")
    async with (
        serving(tmp_path, http_port=0) as this,
        connected(this.server) as stub,
        grpc.aio.insecure_channel(this.server.grpc_address) as channel,
        httpx.AsyncClient(base_url=f"http://{this.server.http_address}", timeout=60) as client,
    ):
        server_ready: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")

        async def ready() -> tuple[set[str], int, bytes]:
            states = {await this.health(service) for service in services}
            probe = await client.get("/healthz/ready")
            assert (await client.get(f"http://{this.server.metrics_address}/healthz")).status_code == probe.status_code
            assert (await client.get("/healthz/live")).status_code == 200
            return states, probe.status_code, await server_ready(b"")

        yes = oip.ServerReadyResponse(ready=True).SerializeToString()
        assert await ready() == ({"SERVING"}, 200, yes)
        await this.manager.unload("de")
        assert await ready() == ({"NOT_SERVING"}, 503, b"")
        assert (await client.get("/healthz/ready")).text == "no model is served"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Translate(pb.TranslateRequest(inputs=[pb.Input(text="hello")]))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "model 'de' is not served now: it was unloaded"
        await this.manager.load("de")
        assert await ready() == ({"SERVING"}, 200, yes)
        shutil.rmtree(tmp_path / "de")
        await this.manager.refresh(["de"])
        assert [await this.health(name) for name in ("", "de", "de/1")] == ["NOT_SERVING", "NOT_FOUND", "NOT_FOUND"]


async def test_the_fake_model_is_no_part_of_a_repository() -> None:
    async with running(EngineDouble()) as server:
        assert server.manager is not None
        await server.manager.load("fake")
        with pytest.raises(InvalidRequest, match="can't be unloaded"):
            await server.manager.unload("fake")


async def test_a_look_by_request_finds_what_is_new_and_what_is_gone(tmp_path: Path) -> None:
    """As SIGHUP asks for it, without a watcher."""
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "nl", 1)
    async with serving(tmp_path) as this:
        write_version(tmp_path, "fr", 1)
        write_version(tmp_path, "de", 2)
        shutil.rmtree(tmp_path / "nl")
        await this.manager.refresh_all()
        assert [await this.version(), await this.version("fr")] == ["2", "1"]
        assert [name for name, _, _ in this.lines] == ["de", "fr"]
        loaded = list(this.engines.loaded)
        await this.manager.refresh_all()
        assert this.engines.loaded == loaded  # what is unchanged stays
