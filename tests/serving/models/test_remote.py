"""Repositories in object stores, on web servers and in images, and everything that can be wrong with them there.

The same tests run against fsspec's store in memory, a real web server and a small registry, and, in `make test-full`, a
real S3 (moto's), an emulator of Google's storage and a real registry (Debian's).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import ssl
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from beamline import Client
from beamline.serving.config import ServeConfig
from beamline.serving.errors import ModelError
from beamline.serving.models import remote
from beamline.serving.models.manager import State
from beamline.serving.models.remote import RemoteRepository, cache_folder, is_remote
from beamline.serving.models.repository import scan
from beamline.serving.models.stores import ObjectStore
from beamline.serving.server import Server
from tests.benchmarks.environments import python_of
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDoubles, started
from tests.serving.doubles import eventually as eventually_in_loop
from tests.serving.models.stores import Bucket, Folder, Image, Store
from tests.support.envoy import free_ports
from tests.support.processes import ROOT, eventually, run_beamline, serving
from tests.support.registries import DebianRegistry, SmallRegistry, docker_registry

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 on this machine."""
    with _server("moto", "moto_server", "-H", "127.0.0.1", "-p") as address:
        yield address


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    """The same of Google's storage."""
    # Else gcsfs asks over gRPC and TLS what kind of bucket it is, which no emulator answers, for a minute each time.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when it is imported
    pytest.importorskip("gcsfs")
    options = ("start", "--host", "localhost", "--in-memory", "--port")
    with _server("gcp_storage", "gcp-storage-emulator", *options) as address:
        yield address


@contextmanager
def _server(peer: str, program: str, *arguments: str) -> Iterator[str]:
    """`arguments` end where the port comes."""
    try:
        path = python_of(peer).parent / program
    except subprocess.CalledProcessError:
        pytest.skip(f"{program} can't be installed here: tests/benchmarks/peers has its name")
    [port] = free_ports(1)
    with subprocess.Popen([str(path), *arguments, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DebianRegistry]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("s3", "gs", "oci")]


@pytest.fixture(params=["memory", "http", "small oci", *FULL])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made: Store
    if request.param == "http":
        made = Folder(tmp_path)
    elif request.param == "memory":
        monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "memory"))
        made = Bucket(fsspec.filesystem("memory"), f"memory:///{uuid.uuid4().hex}")
    elif request.param == "small oci":
        registry = SmallRegistry().__enter__()
        made = Image(registry.host, registry)
    elif request.param == "oci":
        made = Image(f"{request.getfixturevalue('debian').host}/{uuid.uuid4().hex}")
    else:
        _point_to(request.param, request.getfixturevalue(request.param), monkeypatch)
        filesystem = fsspec.filesystem(request.param, skip_instance_cache=True)
        bucket = f"models-{uuid.uuid4().hex}"

        def created() -> bool:
            try:
                filesystem.mkdir(bucket)
            except Exception:
                return False
            return True

        eventually(created, "the store answers")
        made = Bucket(filesystem, f"{request.param}://{bucket}")
    yield made
    made.close()


def _point_to(scheme: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users do, by variables and fsspec's own configuration."""
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    if scheme == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    else:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})


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
    """Nothing that is under way may be left, hidden or not. An image's layers are kept for its next state."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not re.match(r"\.layers/[0-9a-f]{64}/", name)}


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


def inside(copy: RemoteRepository) -> Any:
    """What fsspec made of the address."""
    assert isinstance(copy._store, ObjectStore)
    return copy._store._files


def test_what_can_not_be_listed_is_not_taken_for_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Bucket(fsspec.filesystem("memory"), f"memory:///{uuid.uuid4().hex}")
    store.put(source)
    copy = RemoteRepository(store.url, tmp_path / "copy")
    copy.sync()
    listed = inside(copy).ls

    def failing(name: str, detail: bool) -> Any:
        if name.endswith("/fr"):
            raise PermissionError("not today")
        return listed(name, detail=detail)

    monkeypatch.setattr(inside(copy), "ls", failing)
    copy.sync()
    assert files(copy.folder) == files(source)


@pytest.mark.parametrize("level", ["de", "de/2"])
def test_one_model_or_one_version(store: Store, source: Path, tmp_path: Path, level: str) -> None:
    store.put(source)
    copy = RemoteRepository(store.below(level), tmp_path / "copy")
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
    get = inside(copy).get_file

    def vanishing(name: str, target: str) -> None:
        if "/fr/1/" in name and name.endswith("weights.bin"):
            inside(copy).rm_file(name)
        get(name, target)

    monkeypatch.setattr(inside(copy), "get_file", vanishing)
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
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)  # it was, for another test
    with pytest.raises(ModelError, match=r"gs://bucket can't be read here .*pip install '\.\[gs\]'"):
        RemoteRepository("gs://bucket", tmp_path)


def test_addresses() -> None:
    assert is_remote("s3://bucket/models")
    assert is_remote("oci://host/models:1")
    assert not is_remote("/models")
    assert not is_remote("model_repo")
    assert cache_folder("s3://a") != cache_folder("s3://b")
    assert cache_folder("s3://a", Path("/cache")).parent == Path("/cache")
