"""The folder of models is followed while it changes, and no call fails for it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc
import pytest

from beamline.serving.models.watcher import Watcher
from tests.serving.disk import write_version
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

    async def refresh(names: list[str]) -> None: ...

    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(Watcher(tmp_path, refresh, sync=sync).run(0.001))
    async with asyncio.timeout(60):
        await asyncio.wait([watching, waiting := asyncio.create_task(enough.wait())], return_when="FIRST_COMPLETED")
    assert waiting.done()
    watching.cancel()
    assert "what nobody thought of" in caplog.text
