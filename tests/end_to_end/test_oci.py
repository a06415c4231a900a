"""Images of models in a real registry, as a user has them: `beamline push`, another tool, and a server that follows."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from beamline import Client
from tests.loadtest.doubles import self_signed
from tests.support.processes import ROOT, eventually, run_beamline, serving
from tests.support.registries import DebianRegistry, docker_registry
from tests.support.shipped import shipped

pytestmark = pytest.mark.full

TEXT = "Save the file."


def push(repository: Path, registry: DebianRegistry, tag: str) -> str:
    """By the command; the image's digest, which it prints."""
    done = run_beamline("push", "--repo", str(repository), f"oci+http://{registry.host}/team/models:{tag}")
    assert done.returncode == 0, done.stderr
    return "sha256:" + done.stdout.partition("sha256:")[2].split()[0]


def skopeo(*arguments: str) -> str:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not here: apt-get install skopeo")
    return subprocess.run(["skopeo", *arguments], check=True, capture_output=True, text=True).stdout


def test_another_tool_reads_what_was_pushed(tmp_path: Path) -> None:
    with docker_registry(tmp_path) as registry:
        digest = push(ROOT / "model_repo", registry, "1")
        address = f"docker://{registry.host}/team/models"
        seen = json.loads(skopeo("inspect", "--tls-verify=false", f"{address}:1"))
        assert seen["Digest"] == digest
        copy = tmp_path / "copy"
        skopeo("copy", "--src-tls-verify=false", f"{address}@{digest}", f"dir:{copy}")
        # And what it copies to another name is served by us.
        skopeo("copy", "--src-tls-verify=false", "--dest-tls-verify=false", f"{address}:1", f"{address}:copied")
        assert push(ROOT / "model_repo", registry, "2") == digest, "the same files make the same image"
        repo, cache = f"oci+http://{registry.host}/team/models:copied", str(tmp_path / "cache")
        with serving(tmp_path / "log", "--repo", repo, "--model-cache", cache, "--load", "en-de") as server:
            assert Client(server.grpc).translate(TEXT, model="en-de").text
    unpacked = tmp_path / "unpacked"
    for layer in json.loads((copy / "manifest.json").read_text())["layers"]:
        with tarfile.open(copy / layer["digest"].partition(":")[2]) as archive:
            archive.extractall(unpacked, filter="data")
    for file in (ROOT / "model_repo").glob("*/[0-9]*/*"):
        place = file.relative_to(ROOT / "model_repo")
        found = [each for each in unpacked.rglob(file.name) if each.parts[-3:] == place.parts]
        assert [each.read_bytes() for each in found] == [file.read_bytes()], place


def test_a_running_server_follows_a_tag_that_moves(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "model_repo" / "en-de", source / "en-de")
    with docker_registry(tmp_path) as registry:
        push(source, registry, "stable")
        repo, cache = f"oci+http://{registry.host}/team/models:stable", str(tmp_path / "cache")
        with serving(tmp_path / "log", "--repo", repo, "--model-cache", cache, "--watch", "1") as server:
            client = Client(server.grpc)

            def versions() -> set[str]:
                return {client.translate(TEXT).version}

            first = shipped("en-de").name
            second = str(int(first) + 1)
            assert versions() == {first}
            shutil.copytree(source / "en-de" / first, source / "en-de" / second)
            manifest = source / "en-de" / second / "manifest.json"
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": int(second)}))
            push(source, registry, "stable")
            eventually(lambda: versions() == {second}, "the new version is served")


def test_a_registry_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted where its certificate is (OpenSSL's own variable names it), refused elsewhere with the reason."""
    made = self_signed(tmp_path)
    tls = {"tls": {"certificate": str(made.certificate), "key": str(made.key)}}
    with docker_registry(tmp_path, http=tls) as registry:
        image = f"oci://{registry.host}/team/models:1"
        refused = run_beamline("push", "--repo", str(ROOT / "model_repo" / "en-de"), image)
        assert refused.returncode != 0
        assert "certificate" in refused.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
        done = run_beamline("push", "--repo", str(ROOT / "model_repo" / "en-de"), image)
        assert done.returncode == 0, done.stderr
        with serving(tmp_path / "log", "--repo", image, "--model-cache", str(tmp_path / "cache")) as server:
            assert Client(server.grpc).translate(TEXT).text
