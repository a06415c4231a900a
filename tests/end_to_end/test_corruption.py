"""A repository in which one model is whole and every other one is broken in its own way: the whole one is served, and
each of the others is refused with a sentence that names the file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from beamline.protos import beamline_pb2 as pb
from beamline.protos import beamline_pb2_grpc
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.errors import ModelError
from beamline.serving.models.repository import scan, verify
from beamline.serving.text.tokenizer import TextTokenizer
from tests.support.processes import PATIENCE, ServerProcess, serving

Spoil = Callable[[Path], object]  # a version folder


@dataclass(frozen=True)
class Corruption:
    name: str  # of the model
    file: str  # that must be named
    sentence: str  # a part of what must be said
    spoil: Spoil


def flip(name: str, where: float) -> Spoil:
    """One bit, at this share of the file."""

    def spoil(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(where * (len(content) - 1))] ^= 1
        (folder / name).write_bytes(content)

    return spoil


def cut(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return spoil


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        change(content)
        (folder / "manifest.json").write_text(json.dumps(content))

    return spoil


def and_sign(spoil: Spoil) -> Spoil:
    """As if it had been written like that: the manifest agrees with what is there."""

    def spoil_and_sign(folder: Path) -> None:
        spoil(folder)

        def sign(manifest: dict[str, Any]) -> None:
            for entry in (*filter(None, manifest["graphs"].values()), manifest["weights"]):
                entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
            manifest["weights"]["bytes"] = (folder / manifest["weights"]["file"]).stat().st_size

        edit_manifest(sign)(folder)

    return spoil_and_sign


def wider_caches(manifest: dict[str, Any]) -> None:
    """Valid in itself, but not what the graphs have."""
    for tensor in manifest["state"]:
        if tensor["kind"] == "cache":
            tensor["shape"][1] += 1


# Found without running anything.
ON_DISK = (
    Corruption("weights-bit", "weights.bin", "is corrupt", flip("weights.bin", 0.5)),
    Corruption("weights-cut", "weights.bin", "the manifest says", cut("weights.bin")),
    Corruption("weights-gone", "weights.bin", "does not exist", remove("weights.bin")),
    Corruption("encoder-bit", "encoder.onnx", "is corrupt", flip("encoder.onnx", 0.3)),
    Corruption("step-bit", "step.onnx", "is corrupt", flip("step.onnx", 0.9)),
    Corruption("step-cut", "step.onnx", "is corrupt", cut("step.onnx")),
    Corruption("score-cut", "score.onnx", "is corrupt", cut("score.onnx")),
    Corruption("score-gone", "score.onnx", "does not exist", remove("score.onnx")),
    Corruption("tokenizer-gone", "target_tokenizer.json", "does not exist", remove("target_tokenizer.json")),
)
MANIFESTS = (
    Corruption("manifest-cut", "manifest.json", "is not JSON", cut("manifest.json")),
    Corruption("manifest-empty", "manifest.json", "is not JSON", write("manifest.json", "")),
    Corruption("manifest-list", "manifest.json", "format version None", write("manifest.json", "[1]")),
    Corruption("manifest-gone", "manifest.json", "the version is incomplete", remove("manifest.json")),
    Corruption(
        "manifest-future", "manifest.json", "format version 99", edit_manifest(lambda m: m.update(format_version=99))
    ),
    Corruption(
        "manifest-types",
        "manifest.json",
        "limits.max_beam_size",
        edit_manifest(lambda m: m["limits"].update(max_beam_size="x")),
    ),
    Corruption("manifest-keys", "manifest.json", "colour", edit_manifest(lambda m: m.update(colour="red"))),
    Corruption("manifest-lacks", "manifest.json", "vocabulary", edit_manifest(lambda m: m.pop("vocabulary"))),
    Corruption("manifest-name", "manifest.json", "says it is other", edit_manifest(lambda m: m.update(name="other"))),
    Corruption(
        "manifest-path",
        "manifest.json",
        "no plain file name",
        edit_manifest(lambda m: m["weights"].update(file="../weights.bin")),
    ),
)
# Found when it is loaded.
AT_LOAD = (
    Corruption("tokenizer-cut", "source_tokenizer.json", "is corrupt", cut("source_tokenizer.json")),
    Corruption("tokenizer-other", "target_tokenizer.json", "is corrupt", write("target_tokenizer.json", "{}")),
    Corruption("graph-signed-cut", "step.onnx", "can't be loaded", and_sign(cut("step.onnx"))),
    Corruption("graph-signed-text", "encoder.onnx", "can't be loaded", and_sign(write("encoder.onnx", "no graph"))),
    Corruption("weights-signed-cut", "onnx", "can't be loaded", and_sign(cut("weights.bin"))),
    Corruption("state-mismatch", "state-mismatch/1", "can't be served", edit_manifest(wider_caches)),
)


def copy_of(model_repository: Path, repository: Path, name: str) -> Path:
    """A whole version under another name."""
    folder = Path(shutil.copytree(model_repository / "tiny" / "1", repository / name / "1"))
    edit_manifest(lambda manifest: manifest.update(name=name))(folder)
    return folder


@pytest.mark.parametrize("corruption", [*ON_DISK, *MANIFESTS], ids=lambda corruption: corruption.name)
def test_a_broken_file_is_named(model_repository: Path, tmp_path: Path, corruption: Corruption) -> None:
    corruption.spoil(copy_of(model_repository, tmp_path, corruption.name))
    copy_of(model_repository, tmp_path, "good")
    repository = scan(tmp_path)
    assert "good" in repository.models
    reasons = [problem.reason for problem in repository.problems]
    for version in repository.models.get(corruption.name, ()):
        with pytest.raises(ModelError) as caught:
            verify(version.folder, version.manifest)
        reasons.append(str(caught.value))
    (reason,) = reasons
    assert f"{tmp_path / corruption.name}/1/{corruption.file}" in reason
    assert corruption.sentence in reason


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.6, 0.85, 1.0])
@pytest.mark.parametrize("name", ["encoder.onnx", "step.onnx", "score.onnx", "weights.bin"])
def test_no_bit_flips_unseen(model_repository: Path, tmp_path: Path, name: str, share: float) -> None:
    folder = copy_of(model_repository, tmp_path, "flipped")
    flip(name, share)(folder)
    with pytest.raises(ModelError, match=f"{name} is corrupt"):
        verify(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["source_tokenizer.json", "target_tokenizer.json"])
def test_a_cut_tokenizer_is_named(model_repository: Path, tmp_path: Path, name: str) -> None:
    folder = copy_of(model_repository, tmp_path, "cut")
    cut(name)(folder)
    with pytest.raises(ModelError, match=f"{name} is not a tokenizer"):
        TextTokenizer.load(folder / name)


@pytest.fixture(scope="module")
def broken_repository(model_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("broken")
    for corruption in (*ON_DISK, *MANIFESTS, *AT_LOAD):
        corruption.spoil(copy_of(model_repository, repository, corruption.name))
    copy_of(model_repository, repository, "good")
    # The newest of this one is broken, the one before it is not.
    copy_of(model_repository, repository, "older")
    newest = Path(shutil.copytree(repository / "older" / "1", repository / "older" / "2"))
    edit_manifest(lambda manifest: manifest.update(version=2))(newest)
    flip("weights.bin", 0.2)(newest)
    return repository


@pytest.fixture(scope="module")
def hardy_server(broken_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with serving(log, "--repo", str(broken_repository), "--threads", "1", "--max-slots", "2") as running:
        yield running


def test_the_whole_ones_are_served(hardy_server: ServerProcess) -> None:
    with grpc.insecure_channel(hardy_server.grpc) as channel:
        stub = beamline_pb2_grpc.InferenceStub(channel)
        for name in ("good", "older"):
            request = pb.TranslateRequest(model=name, inputs=[pb.Input(text="a value")])
            answer = stub.Translate(request, timeout=PATIENCE)
            assert (answer.model, answer.version) == (name, "1")
        with pytest.raises(grpc.RpcError) as refused:
            stub.Translate(pb.TranslateRequest(model="weights-bit", inputs=[pb.Input(text="a value")]))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # it is known, and so is the reason
    assert "weights.bin is corrupt" in (refused.value.details() or "")


def test_every_broken_one_is_reported(hardy_server: ServerProcess, broken_repository: Path) -> None:
    log = hardy_server.log.read_text()
    reports = [line for line in log.splitlines() if " could not be loaded: " in line]
    for corruption in (*ON_DISK, *MANIFESTS, *AT_LOAD):
        (report,) = (line for line in reports if f"{broken_repository / corruption.name}/1" in line)
        assert corruption.file in report
        assert corruption.sentence in report
    assert sum(f"{broken_repository}/older/2/weights.bin is corrupt" in line for line in reports) == 1
    assert len(reports) == len(ON_DISK) + len(MANIFESTS) + len(AT_LOAD) + 1
    assert "Traceback" not in log
