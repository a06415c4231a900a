"""The folder of models is followed while it changes, and no call fails for it."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.serving.errors import ModelError, OutOfMemory
from beamline.serving.models import manager
from beamline.serving.models.loading import LoadTooLong
from beamline.serving.models.repository import Repository, scan
from beamline.serving.models.watcher import Watcher
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDouble, EngineDoubles
from tests.serving.models.managed import looked, serving


async def test_the_folder_is_followed(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        await looked(this, watcher)
        assert this.engines.loaded == [("de", 1)]
        write_version(tmp_path, "de", 2)
        write_version(tmp_path, "fr", 1)
        await watcher.look()
        assert this.engines.loaded == [("de", 1)]  # it may still be written to
        await watcher.look()
        assert [await this.version(), await this.version("fr")] == ["2", "1"]
        shutil.rmtree(tmp_path / "de" / "2")
        await looked(this, watcher)
        assert await this.version() == "1"
        (tmp_path / "de" / "serving.toml").write_text("slots = 2")
        await looked(this, watcher)
        assert this.engines.settings[-1].slots == 2


async def test_a_folder_that_is_deleted(tmp_path: Path) -> None:
    """Unwatched, it is served on from memory; watched, it is unloaded, and its name is forgotten."""
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "fr", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        shutil.rmtree(tmp_path / "de")
        assert await this.version() == "1"
        await looked(this, watcher)
        assert [await this.health(name) for name in ("de", "de/1", "fr")] == ["NOT_FOUND", "NOT_FOUND", "SERVING"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await this.version()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        # The folder is there but empty, as while a version is exchanged by hand: not unloaded.
        shutil.rmtree(tmp_path / "fr" / "1")
        await looked(this, watcher)
        assert await this.version("fr") == "1"
        # The whole repository is away, as when a network goes down.
        shutil.rmtree(tmp_path)
        await looked(this, watcher)
        assert await this.version("fr") == "1"


async def test_a_mended_model_is_picked_up_and_an_unloaded_one_left_alone(tmp_path: Path) -> None:
    folder = write_version(tmp_path, "de", 1)
    good = (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").write_bytes(good[:10])
    write_version(tmp_path, "fr", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        await this.manager.unload("fr")
        (folder / "weights.bin").write_bytes(good)
        write_version(tmp_path, "fr", 2)
        await looked(this, watcher)
        assert await this.version() == "1"
        assert this.reason("fr") == "it was unloaded"


async def test_an_empty_repository_that_is_watched_may_fill_later(tmp_path: Path) -> None:
    async with serving(tmp_path, watch_seconds=0.05) as this:
        write_version(tmp_path, "de", 1)
        async with asyncio.timeout(60):
            while await this.health("de") != "SERVING":
                await asyncio.sleep(0.01)
        assert await this.version() == "1"


async def test_whatever_a_look_raises_the_watcher_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[None] = []
    enough = asyncio.Event()

    def sync() -> None:
        looks.append(None)
        if len(looks) == 1:
            raise RuntimeError("what nobody thought of")
        loop.call_soon_threadsafe(enough.set)

    async def refresh(names: list[str]) -> list[str]:
        return []

    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(Watcher(tmp_path, refresh, sync=sync).run(0.001))
    async with asyncio.timeout(60):
        await asyncio.wait([watching, waiting := asyncio.create_task(enough.wait())], return_when="FIRST_COMPLETED")
    assert waiting.done()
    watching.cancel()
    assert "what nobody thought of" in caplog.text


async def test_what_failed_for_a_reason_that_may_pass_is_tried_again_ever_more_rarely(tmp_path: Path) -> None:
    write_version(tmp_path, "fr", 1)
    looks, attempts = 0, list[tuple[int, list[str]]]()
    fails = {"de"}

    async def refresh(names: list[str]) -> set[str]:
        attempts.append((looks, sorted(names)))
        return fails & set(names)

    watcher = Watcher(tmp_path, refresh)
    write_version(tmp_path, "de", 1)
    write_version(tmp_path, "fr", 2)
    while (looks := looks + 1) < 20:
        await watcher.look()
    assert attempts == [(2, ["de", "fr"]), (3, ["de"]), (5, ["de"]), (9, ["de"]), (17, ["de"])]
    attempts.clear()
    write_version(tmp_path, "de", 2)  # another change is followed at once, and the pauses begin anew
    looks = 19
    while (looks := looks + 1) < 25:
        await watcher.look()
    assert attempts == [(21, ["de"]), (22, ["de"]), (24, ["de"])]
    attempts.clear()
    shutil.rmtree(tmp_path / "de")
    fails.clear()
    looks = 24
    while (looks := looks + 1) < 60:
        await watcher.look()
    assert attempts == [(26, ["de"])]


async def test_a_pause_has_an_end_and_a_refresh_that_raises_is_tried_again(tmp_path: Path) -> None:
    looks, attempts = 0, list[int]()

    async def refresh(names: list[str]) -> set[str]:
        attempts.append(looks)
        raise RuntimeError("boo")

    watcher = Watcher(tmp_path, refresh)
    write_version(tmp_path, "de", 1)
    while (looks := looks + 1) < 1000:
        with suppress(RuntimeError):
            await watcher.look()
    assert attempts[-1] - attempts[-2] == attempts[-2] - attempts[-3] == 128


@pytest.mark.parametrize("failure", ["memory", "time", "repository"])
async def test_a_change_is_not_lost_where_its_load_failed_for_a_passing_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    failing: list[Exception] = []
    load = EngineDoubles._load

    def loads(self: EngineDoubles, *arguments: Any) -> EngineDouble:
        if failing and failure != "repository":
            raise failing.pop()
        return load(self, *arguments)

    def scans(*arguments: Any) -> Repository:
        if failing and failure == "repository":
            raise failing.pop()
        return scan(*arguments)

    monkeypatch.setattr(EngineDoubles, "_load", loads)
    monkeypatch.setattr(manager, "scan", scans)
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        watcher = Watcher(tmp_path, this.manager.refresh)
        errors = {"memory": OutOfMemory, "time": LoadTooLong, "repository": ModelError}
        failing.append(errors[failure]("not now"))
        write_version(tmp_path, "de", 2)
        await looked(this, watcher)
        assert (failing, await this.version()) == ([], "1")
        await watcher.look()
        assert await this.version() == "2"
        loaded = list(this.engines.loaded)
        for _ in range(5):
            await watcher.look()
        assert this.engines.loaded == loaded


async def test_what_is_broken_in_the_folder_is_not_tried_again_before_it_changes(tmp_path: Path) -> None:
    write_version(tmp_path, "de", 1)
    async with serving(tmp_path) as this:
        (write_version(tmp_path, "de", 2) / "weights.bin").write_bytes(b"short")
        assert await this.manager.refresh(["de"]) == set()
        assert this.reason("de", "2")
