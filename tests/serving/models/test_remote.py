"""Repositories in object stores and on web servers, and everything that can be wrong with them there.

The same tests run against fsspec's store in memory, a real web server, and, in `make test-full`, a real S3 (moto's).
"""

from __future__ import annotations

import http.server
import logging
import os
import shutil
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import trustme

from beamline import Client
from beamline.serving.config import ServeConfig
from beamline.serving.errors import ModelError
from beamline.serving.models import remote
from beamline.serving.models.manager import State
from beamline.serving.models.remote import RemoteRepository, cache_folder, is_remote
from beamline.serving.models.repository import scan
from beamline.serving.server import Server
from tests.benchmarks.environments import python_of
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDoubles, started
from tests.serving.doubles import eventually as eventually_in_loop
from tests.support.envoy import free_ports
from tests.support.processes import ROOT, eventually, run_beamline, serving

fsspec = pytest.importorskip("fsspec")


class Store(Protocol):
    """Where a test puts and deletes objects, as somebody else would."""

    url: str

    def put(self, folder: Path) -> None:
        """All of it, and nothing else."""

    def close(self) -> None: ...


class Folder:
    """A web server over a folder, which lists what is in it."""

    def __init__(self, tmp_path: Path, tls: ssl.SSLContext | None = None) -> None:
        self._folder = tmp_path / "served"
        handler = partial(_Quiet, directory=str(self._folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"

    def put(self, folder: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(folder, self._folder)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Bucket:
    def __init__(self, filesystem: Any, url: str) -> None:
        self._filesystem = filesystem
        self.url = f"{url}/repo"
        self._root = self.url.partition("://")[2]

    def put(self, folder: Path) -> None:
        if self._filesystem.exists(self._root):
            self._filesystem.rm(self._root, recursive=True)
        for path in (path for path in folder.rglob("*") if path.is_file()):
            self._filesystem.pipe_file(f"{self._root}/{path.relative_to(folder)}", path.read_bytes())

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 on this machine."""
    try:
        program = python_of("moto").parent / "moto_server"
    except subprocess.CalledProcessError:
        pytest.skip("moto can't be installed here: pip install 'moto[server,s3]'")
    [port] = free_ports(1)
    with subprocess.Popen([str(program), "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(params=["memory", "http", pytest.param("s3", marks=pytest.mark.full)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made: Store
    if request.param == "http":
        made = Folder(tmp_path)
    elif request.param == "memory":
        monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
        made = Bucket(fsspec.filesystem("memory"), f"memory:///{uuid.uuid4().hex}")
    else:
        address = request.getfixturevalue("s3")
        for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        bucket = f"models-{uuid.uuid4().hex}"

        def created() -> bool:
            try:
                filesystem.mkdir(bucket)
            except Exception:
                return False
            return True

        eventually(created, "the S3 answers")
        made = Bucket(filesystem, f"s3://{bucket}")
    yield made
    made.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_version(folder, "de", 1)
    write_version(folder, "de", 2)
    write_version(folder, "fr", 1)
    (folder / "de" / "serving.toml").write_text("slots = 3\n")
    return folder


def found(folder: Path) -> dict[str, list[int]]:
    repository = scan(folder)
    assert repository.problems == ()
    return {name: [each.version for each in versions] for name, versions in repository.models.items()}


def files(folder: Path) -> dict[str, bytes]:
    """Nothing that is under way may be left, hidden or not."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_is_copied_and_followed(store: Store, source: Path, tmp_path: Path) -> None:
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    copy.sync()
    assert files(copy.folder) == files(source)
    assert found(copy.folder) == {"de": [1, 2], "fr": [1]}
    before = {path: path.stat().st_ctime_ns for path in copy.folder.rglob("*") if path.is_file()}
    copy.sync()
    assert {path: path.stat().st_ctime_ns for path in copy.folder.rglob("*") if path.is_file()} == before
    write_version(source, "de", 3)
    shutil.rmtree(source / "de" / "1")
    shutil.rmtree(source / "fr")
    (source / "de" / "serving.toml").write_text("slots = 4\n")
    store.put(source)
    copy.sync()
    assert found(copy.folder) == {"de": [2, 3]}
    assert files(copy.folder) == files(source)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "name", "said"),
    [
        (truncate, "weights.bin", "weights.bin has 699 bytes"),
        (flip, "weights.bin", "weights.bin is corrupt"),
        (flip, "step.onnx", "step.onnx is corrupt"),
        (Path.unlink, "step.onnx", "does not exist"),
        (halve, "manifest.json", "manifest.json"),
    ],
)
def test_what_is_broken_there_is_never_served(
    store: Store,
    source: Path,
    tmp_path: Path,
    harm: Callable[[Path], None],
    name: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    copy.sync()
    good = files(source)
    broken = write_version(source, "fr", 2)
    harm(broken / name)
    store.put(source)
    with caplog.at_level(logging.ERROR):
        copy.sync()
        copy.sync()
    [line] = [record.getMessage() for record in caplog.records]  # once, however often it is looked at
    assert said in line
    assert "fr/2" in line
    assert files(copy.folder) == good
    shutil.rmtree(broken)
    write_version(source, "fr", 2)
    store.put(source)
    copy.sync()
    assert found(copy.folder) == {"de": [1, 2], "fr": [1, 2]}


def test_a_store_that_is_away_or_emptied_leaves_the_copy(store: Store, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        RemoteRepository(store.url, tmp_path / "nothing").sync()
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    copy.sync()
    (tmp_path / "empty").mkdir()
    store.put(tmp_path / "empty")
    copy.sync()
    store.close()
    RemoteRepository(store.url, copy.folder).sync()
    assert files(copy.folder) == files(source)


def test_what_can_not_be_listed_is_not_taken_for_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Bucket(fsspec.filesystem("memory"), f"memory:///{uuid.uuid4().hex}")
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    copy.sync()
    listed = copy._store.ls

    def failing(name: str, detail: bool) -> Any:
        if name.endswith("/fr"):
            raise PermissionError("not today")
        return listed(name, detail=detail)

    monkeypatch.setattr(copy._store, "ls", failing)
    copy.sync()
    assert files(copy.folder) == files(source)


@pytest.mark.parametrize("level", ["de", "de/2"])
def test_one_model_or_one_version(store: Store, source: Path, tmp_path: Path, level: str) -> None:
    store.put(source)
    copy = RemoteRepository(f"{store.url}/{level}", tmp_path / "copy")
    copy.sync()
    copy.sync()
    assert found(copy.folder) == {"de": [1, 2] if level == "de" else [2]}


def test_a_version_that_vanishes_while_it_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = fsspec.filesystem("memory")
    store = Bucket(filesystem, f"memory:///{uuid.uuid4().hex}")
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    get = copy._store.get_file

    def vanishing(name: str, target: str) -> None:
        if "/fr/1/" in name and name.endswith("weights.bin"):
            copy._store.rm_file(name)
        get(name, target)

    monkeypatch.setattr(copy._store, "get_file", vanishing)
    copy.sync()
    assert found(copy.folder) == {"de": [1, 2]}
    assert not [name for name in os.listdir(copy.folder) if name.startswith(".")]


async def test_a_server_follows_it(source: Path, tmp_path: Path) -> None:
    store = Folder(tmp_path)
    store.put(source)
    config = ServeConfig(
        repository=tmp_path / "copy", remote=store.url, grpc_port=0, metrics_port=0, watch_seconds=0.05
    )
    async with started(Server(config, EngineDoubles().makers)) as server:
        manager = server.manager
        assert manager is not None

        def served() -> list[tuple[str, str]]:
            return [(each.name, each.version) for each in manager.index() if each.state is State.READY]

        assert served() == [("de", "2"), ("fr", "1")]
        write_version(source, "de", 3)
        store.put(source)
        await eventually_in_loop(lambda: served() == [("de", "3"), ("fr", "1")])
    store.close()


@pytest.mark.full
def test_over_https_with_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    store = Folder(tmp_path, tls)
    store.put(ROOT / "model_repo" / "en-de")
    arguments = ("--repo", store.url, "--model-cache", str(tmp_path / "cache"))
    refused = run_beamline("serve", "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", *arguments)
    assert refused.returncode != 0
    assert "certificate" in refused.stderr.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with serving(tmp_path / "log", *arguments) as server, Client(server.grpc) as client:
        assert client.translate("Save the file.").text == "Die Datei speichern."
    store.close()


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ModelError, match=r"gs://bucket can't be read here .*pip install '\.\[gs\]'"):
        RemoteRepository("gs://bucket", tmp_path)


def test_addresses() -> None:
    assert is_remote("s3://bucket/models")
    assert not is_remote("/models")
    assert not is_remote("model_repo")
    assert cache_folder("s3://a") != cache_folder("s3://b")
    assert cache_folder("s3://a", Path("/cache")).parent == Path("/cache")
