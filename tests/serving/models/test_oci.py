"""Images in container registries: what is fetched, what is refused, and images that others have built."""

from __future__ import annotations

import gzip
import io
import json
import logging
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beamline.serving.commands.push import layers_of
from beamline.serving.errors import ModelError
from beamline.serving.models import oci_registry
from beamline.serving.models.oci_image import push
from beamline.serving.models.oci_registry import Descriptor, ImageManifest, Reference, digest_of
from beamline.serving.models.remote import RemoteRepository
from beamline.serving.models.repository import scan
from tests.serving.disk import write_version
from tests.support.registries import PASSWORD, USER, DebianRegistry, Registry, SmallRegistry, docker_registry

GZIPPED = "application/vnd.docker.image.rootfs.diff.tar.gzip"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_version(tmp_path / "source", "de", 1)
    (tmp_path / "source" / "de" / "serving.toml").write_text("slots = 3\n")
    return tmp_path / "source"


@pytest.fixture
def registry() -> Iterator[SmallRegistry]:
    with SmallRegistry() as made:
        yield made


def reference(registry: Registry, tag: str = "models:1") -> Reference:
    return Reference.parse(f"oci+http://{registry.host}/team/{tag}")


def pushed(source: Path, to: Reference) -> str:
    return push(to, layers_of(scan(source)))


def found(copy: RemoteRepository) -> dict[str, list[int]]:
    repository = scan(copy.folder)
    assert repository.problems == ()
    return {name: [each.version for each in versions] for name, versions in repository.models.items()}


def test_only_layers_that_are_new_are_sent_and_fetched(source: Path, tmp_path: Path, registry: SmallRegistry) -> None:
    image = reference(registry)
    first = pushed(source, image)
    copy = RemoteRepository(str(image), tmp_path / "copy")
    copy.sync()
    assert (copy.folder / "de" / "serving.toml").read_text() == "slots = 3\n"
    blobs = set(registry.blobs)
    shutil.move(source, tmp_path / "elsewhere")  # names, owners and times are not part of it
    assert pushed(tmp_path / "elsewhere", image) == first
    assert set(registry.blobs) == blobs
    write_version(tmp_path / "elsewhere", "de", 2)
    pushed(tmp_path / "elsewhere", image)
    registry.requests.clear()
    again = RemoteRepository(str(image), copy.folder)  # a restart
    again.sync()
    again.sync()
    assert found(again) == {"de": [1, 2]}
    fetched = [each for each in registry.requests if "/blobs/" in each]
    assert len(fetched) == 1
    assert len(list((copy.folder / ".layers").iterdir())) == 3
    shutil.rmtree(tmp_path / "elsewhere" / "de" / "1")
    pushed(tmp_path / "elsewhere", image)
    again.sync()
    assert found(again) == {"de": [2]}
    assert len(list((copy.folder / ".layers").iterdir())) == 2
    pinned = RemoteRepository(f"oci+http://{registry.host}/team/models@{first}", tmp_path / "pinned")
    pinned.sync()
    assert found(pinned) == {"de": [1]}


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


HARMS: list[tuple[Callable[[bytes], bytes | None], str]] = [
    (flipped, "is corrupt"),
    (lambda content: content[:-1], "broke off"),
    (lambda content: content + b"x", "is longer than"),
    (lambda content: None, "does not have the blob"),
]


def harms_leave_what_was_there(registry: Registry, source: Path, folder: Path, harm: int, log: Any) -> None:
    change, said = HARMS[harm]
    image = reference(registry, f"harm{harm}:1")
    pushed(source, image)
    copy = RemoteRepository(str(image), folder / "copy")
    copy.sync()
    write_version(source, "de", 2)
    (source / "de" / "2" / "extra.txt").write_text(f"{harm}")  # a blob of its own
    pushed(source, image)
    before: list[bytes] = []
    blob = layer_of(image, "de/2")

    def remembering(content: bytes) -> bytes | None:
        before.append(content)
        return change(content)

    registry.harm(blob, remembering)
    with log.at_level(logging.ERROR):
        copy.sync()
        copy.sync()
    [line] = [record.getMessage() for record in log.records]
    assert said in line
    assert blob in line
    assert found(copy) == {"de": [1]}
    assert {path.name for path in copy.folder.iterdir()} == {"de", ".layers"}
    assert not [path for path in (copy.folder / ".layers").iterdir() if path.name.startswith(".")]
    with pytest.raises(ModelError, match=said):
        RemoteRepository(str(image), folder / "empty").sync()
    heal(registry, blob, before[0])
    copy.sync()
    assert found(copy) == {"de": [1, 2]}


def layer_of(image: Reference, title: str) -> str:
    manifest = ImageManifest.model_validate_json(oci_registry.Registry(image).manifest(image.tag)[0])
    [digest] = [each.digest for each in manifest.layers if title in (each.annotations or {}).values()]
    return digest


def heal(registry: Registry, digest: str, content: bytes) -> None:
    if isinstance(registry, SmallRegistry):
        registry.blobs[digest] = content
    else:
        assert isinstance(registry, DebianRegistry)
        registry.place(digest).write_bytes(content)


@pytest.mark.parametrize("harm", range(len(HARMS)))
def test_a_harmed_blob_leaves_what_was_there(
    registry: SmallRegistry, source: Path, tmp_path: Path, harm: int, caplog: pytest.LogCaptureFixture
) -> None:
    harms_leave_what_was_there(registry, source, tmp_path, harm, caplog)


@pytest.mark.full
@pytest.mark.parametrize("harm", range(len(HARMS)))
def test_and_so_in_a_real_registry(source: Path, tmp_path: Path, harm: int, caplog: pytest.LogCaptureFixture) -> None:
    with docker_registry(tmp_path) as registry:
        harms_leave_what_was_there(registry, source, tmp_path, harm, caplog)


def test_a_transfer_that_breaks_off(source: Path, tmp_path: Path, registry: SmallRegistry) -> None:
    image = reference(registry)
    pushed(source, image)
    registry.breaks_off = layer_of(image, "de/1")
    copy = RemoteRepository(str(image), tmp_path / "copy")
    with pytest.raises(ModelError, match="broke off after"):
        copy.sync()
    registry.breaks_off = ""
    copy.sync()
    assert found(copy) == {"de": [1]}


def test_a_registry_that_wants_a_token(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: SmallRegistry
) -> None:
    image = reference(registry)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    registry.wants_token = registry.redirects = True
    with pytest.raises(ModelError, match="wants a token"):
        pushed(source, image)
    entry = {"username": USER, "password": PASSWORD}
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: entry}}))
    pushed(source, image)
    copy = RemoteRepository(str(image), tmp_path / "copy")
    copy.sync()
    assert found(copy) == {"de": [1]}
    assert any(each.startswith("GET /elsewhere/") for each in registry.requests)
    assert registry.leaked == []


def archive(files: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as made:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
        for name in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            made.addfile(entry)
    return content.getvalue()


def files_of(folder: Path, prefix: str) -> dict[str, bytes]:
    return {f"{prefix}{each.relative_to(folder)}": each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def publish(registry: SmallRegistry, layers: list[bytes], tag: str = "1", index: bool = False) -> None:
    """As somebody else's tools would: compressed, in Docker's words."""
    registry.blobs |= {digest_of(each): each for each in layers}
    described = [Descriptor(media_type=GZIPPED, digest=digest_of(each), size=len(each)) for each in layers]
    config = Descriptor(media_type="any", digest=digest_of(b"{}"), size=2)
    content: dict[str, Any] = {"config": config.model_dump(by_alias=True)}
    content["layers"] = [each.model_dump(by_alias=True) for each in described]
    manifest = json.dumps(content).encode()
    registry.manifests |= {tag: (MANIFEST, manifest), digest_of(manifest): (MANIFEST, manifest)}
    if index:
        entry = {"mediaType": MANIFEST, "digest": digest_of(manifest), "size": len(manifest)}
        foreign = {"platform": {"os": "linux", "architecture": "s390x"}, **entry, "digest": digest_of(b"other")}
        ours = [{"platform": {"os": "linux", "architecture": each}, **entry} for each in ("amd64", "arm64")]
        registry.manifests[tag] = INDEX, json.dumps({"manifests": [foreign, *ours]}).encode()


@pytest.mark.parametrize("index", [False, True])
def test_images_that_others_built(source: Path, tmp_path: Path, registry: SmallRegistry, index: bool) -> None:
    write_version(source, "de", 2)
    write_version(source, "de", 3)
    write_version(source, "fr", 1)
    base = archive({"bin/sh": b"x", "usr/share/a/b/c/manifest.json": b"{}"}, links=("models/de/4/manifest.json",))
    models = archive(files_of(source, "./models/"))
    removed = archive({"models/de/.wh.1": b"", "models/fr/.wh..wh..opq": b"", "models/de/serving.toml": b"slots = 5\n"})
    publish(registry, [gzip.compress(base), gzip.compress(models), removed], index=index)
    copy = RemoteRepository(f"{reference(registry)}#models", tmp_path / "copy")
    copy.sync()
    assert found(copy) == {"de": [2, 3]}
    assert (copy.folder / "de" / "serving.toml").read_text() == "slots = 5\n"
    assert not list(copy.folder.rglob("sh"))  # what is no model's is not even unpacked


def test_what_is_no_image_of_models(tmp_path: Path, registry: SmallRegistry) -> None:
    copy = RemoteRepository(str(reference(registry)), tmp_path / "copy")

    def refused() -> str:
        with pytest.raises(ModelError) as error:
            copy.sync()
        return str(error.value)

    assert "does not have the image" in refused()
    publish(registry, [archive({"../../outside": b"x"})])
    assert "leads out of the image" in refused()
    publish(registry, [b"no tar file"])
    assert "must be a tar file" in refused()
    publish(registry, [gzip.compress(archive({"a": bytes(10_000)}))[:-40]])
    assert "can't be unpacked" in refused()
    publish(registry, [archive({"readme": b"x"})])
    assert "has no model" in refused()
    for broken in (b"<html>", b"[]", b'{"layers": [{"digest": "md5:0"}]}', b'{"manifests": []}'):
        registry.manifests["1"] = MANIFEST, broken
        assert "no image" in refused()
    assert not (tmp_path / "outside").exists()
    registry.__exit__()
    assert "can't be reached" in refused()


@pytest.mark.parametrize(
    "text",
    ["oci://host", "oci://host/UPPER:1", "oci://host/a:b:c", "oci://host/a@sha256:12", "oci://host/a:" + "x" * 129],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ModelError, match="it must be oci://HOST/NAME:TAG"):
        Reference.parse(text)


def test_addresses() -> None:
    assert Reference.parse("oci://host:5000/team/models").tag == "latest"
    assert str(Reference.parse("oci://h/a/b:1#models/de")) == "oci://h/a/b:1"
    digest = "sha256:" + "a" * 64
    assert str(Reference.parse(f"oci://h/a:1@{digest}")) == f"oci://h/a@{digest}"


def test_only_whole_repositories_are_pushed(source: Path) -> None:
    (source / "de" / "1" / "weights.bin").write_bytes(b"x")
    write_version(source, "fr", 1)
    (source / "fr" / "1" / "step.onnx").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin has 1 bytes.*; .*step\.onnx does not exist"):
        layers_of(scan(source))
    (source / "empty").mkdir()
    with pytest.raises(ModelError, match="has no model"):
        layers_of(scan(source / "empty"))


def test_one_version_or_model_is_pushed_under_its_name(source: Path) -> None:
    for folder in (source / "de", source / "de" / "1"):
        titles = [each.title for each in layers_of(scan(folder))]
        assert titles[0] == "de/1"
