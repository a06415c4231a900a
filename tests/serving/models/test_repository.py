from __future__ import annotations

import os
from pathlib import Path

import pytest

from beamline.serving.contract.manifest import MANIFEST_FILE, read_manifest
from beamline.serving.errors import ManifestError, ModelError
from beamline.serving.models.repository import Problem, newest, scan, verify
from tests.serving.disk import unreadable, write_version


def test_versions_are_numbers(tmp_path: Path) -> None:
    for version in (9, 10, 2):
        write_version(tmp_path, "de", version)
    write_version(tmp_path, "fr")
    repository = scan(tmp_path)
    assert [version.version for version in repository.models["de"]] == [2, 9, 10]
    assert newest(repository.models["de"]).version == 10
    assert list(repository.models) == ["de", "fr"]
    assert repository.problems == ()


def test_what_is_hidden_or_no_folder_is_not_a_model(tmp_path: Path) -> None:
    write_version(tmp_path, "de")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".git" / "1").mkdir(parents=True)
    (tmp_path / "de" / ".converting").mkdir()
    repository = scan(tmp_path)
    assert list(repository.models) == ["de"]
    assert repository.problems == ()


def test_broken_ones_are_named_and_the_others_stay(tmp_path: Path) -> None:
    write_version(tmp_path, "good")
    write_version(tmp_path, "good", 2)
    (tmp_path / "good" / "2" / MANIFEST_FILE).write_text("{", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "1").mkdir(parents=True)
    (tmp_path / "named" / "latest").mkdir(parents=True)
    (tmp_path / "zero" / "0").mkdir(parents=True)
    write_version(tmp_path, "moved").rename(tmp_path / "moved" / "7")
    repository = scan(tmp_path)
    assert list(repository.models) == ["good"]
    assert [version.version for version in repository.models["good"]] == [1]
    reasons = {problem.model: problem.reason for problem in repository.problems}
    assert reasons["good"].startswith(f"{tmp_path / 'good' / '2' / MANIFEST_FILE} is not JSON")
    assert reasons["empty"] == f"{tmp_path / 'empty'} has no version folder"
    assert reasons["half"] == f"{tmp_path / 'half' / '1' / MANIFEST_FILE} does not exist: the version is incomplete"
    assert "positive whole number" in reasons["named"]
    assert "positive whole number" in reasons["zero"]
    assert "says it is moved version 1, but lies in the folder of moved version 7" in reasons["moved"]


def test_a_version_that_can_not_be_looked_into_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_version(tmp_path, "de")
    closed = write_version(tmp_path, "de", 2)
    write_version(tmp_path, "fr")
    unreadable(monkeypatch, closed)
    repository = scan(tmp_path)
    assert {name: [each.version for each in versions] for name, versions in repository.models.items()} == {
        "de": [1],
        "fr": [1],
    }
    assert repository.problems == (Problem("de", f"{closed} can't be read: Permission denied", "2"),)


def test_one_model_with_a_version_that_can_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still one model, and not a repository of models named 1 and 2."""
    write_version(tmp_path, "de")
    closed = write_version(tmp_path, "de", 2)
    unreadable(monkeypatch, closed)
    assert [each.version for each in scan(tmp_path / "de").models["de"]] == [1]
    unreadable(monkeypatch, tmp_path / "de" / "1")
    with pytest.raises(ModelError, match="can't be read: Permission denied"):
        scan(tmp_path / "de")


def test_a_checkpoint_is_told_from_a_model(tmp_path: Path) -> None:
    checkpoint = tmp_path / "Opus"
    (checkpoint / "onnx").mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    convert = f"it is a checkpoint, convert it first: beamline convert {checkpoint} --name opus"
    with pytest.raises(ModelError) as refused:
        scan(checkpoint)
    assert str(refused.value) == f"{checkpoint} is no model repository: {convert}"
    write_version(tmp_path, "de")
    (tmp_path / "config.json").write_text("{}")  # beside models it is only a file
    (tmp_path / "de" / "config.json").write_text("{}")
    found = scan(tmp_path)
    assert list(found.models) == ["de"]
    assert [each.reason for each in found.problems] == [f"{checkpoint} has no version folder: {convert}"]


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere can't be read: No such file"):
        scan(tmp_path / "nowhere")


def test_a_whole_version_verifies(tmp_path: Path) -> None:
    folder = write_version(tmp_path)
    verify(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["encoder.onnx", "step.onnx", "score.onnx", "weights.bin"])
def test_a_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    folder = write_version(tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name} is corrupt"):
        verify(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["encoder.onnx", "weights.bin", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_version(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name} does not exist"):
        verify(folder, read_manifest(folder))


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    folder = write_version(tmp_path)
    (folder / "weights.bin").write_bytes(b"weights")
    with pytest.raises(ModelError, match=r"weights.bin has 7 bytes; the manifest says 700"):
        verify(folder, read_manifest(folder))


def test_weights_that_vanish_while_they_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_version(tmp_path)
    manifest = read_manifest(folder)
    stat = Path.stat

    def gone(path: Path, **options: bool) -> os.stat_result:
        if path.name == "weights.bin":
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    with pytest.raises(ModelError, match=r"weights.bin can't be read: No such file"):
        verify(folder, manifest)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "sub/x.onnx", "..", "", "a\\b", "a\0b"])
def test_a_manifest_can_not_reach_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = write_version(tmp_path)
    manifest = read_manifest(folder)
    file = manifest.tokenizers.target.model_copy(update={"file": name})
    tokenizers = manifest.tokenizers.model_copy(update={"target": file})
    with pytest.raises(ManifestError, match="no plain file name"):
        verify(folder, manifest.model_copy(update={"tokenizers": tokenizers}))
