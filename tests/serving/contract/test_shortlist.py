"""The file of a lexical table: read back as it was written, and refused with a sentence where it is wrong."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beamline.serving.backends.factory import make_backend
from beamline.serving.backends.probe import CudaDevice
from beamline.serving.backends.selection import Choice
from beamline.serving.contract.manifest import File, Manifest
from beamline.serving.contract.shortlist import Lexicon, load_lexicon
from beamline.serving.errors import ModelError
from beamline.serving.models.settings import SETTINGS_FILE, read_settings
from tests.serving.doubles import small_manifest

ROOT = Path(__file__).parents[3]
NAME = "shortlist.npz"


@pytest.fixture
def manifest() -> Manifest:
    return small_manifest().model_copy(update={"shortlist": File(file=NAME, sha256="")})


def good(manifest: Manifest) -> Lexicon:
    sizes, files = manifest.vocabulary, manifest.tokenizers
    return Lexicon(
        (files.source.sha256, files.target.sha256),
        np.array([0, 1], np.int32),
        np.minimum(np.arange(sizes.source_size + 1), 3).astype(np.int64),
        np.array([2, 0, sizes.target_size - 1], np.int32),
    )


def save(folder: Path, table: Lexicon) -> None:
    with (folder / NAME).open("wb") as file:
        table.save(file)


def test_a_request_may_say_what_its_words_may_mean(tmp_path: Path, manifest: Manifest) -> None:
    save(tmp_path, good(manifest))
    table = load_lexicon(tmp_path, manifest)
    size = manifest.vocabulary.target_size
    assert np.flatnonzero(table.allowed([2], [], size)).tolist() == [0, 1, size - 1]
    assert np.flatnonzero(table.allowed([0, 0, 5], [3], size)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda table: replace(table, tokenizers=("old", "old")), "made for other tokenizers"),
        (lambda table: replace(table, offsets=table.offsets[:-1]), "not for the .* source words"),
        (lambda table: replace(table, offsets=table.offsets[::-1].copy()), "not for the .* source words"),
        (lambda table: replace(table, words=table.words + 1), "outside the vocabulary"),
        (lambda table: replace(table, words=table.words[:-1]), "outside the vocabulary"),
        (lambda table: replace(table, always=table.always - 1), "outside the vocabulary"),
        (lambda table: replace(table, always=np.array([0.5])), "is not a shortlist"),
        (lambda table: replace(table, words=np.array([object()])), "is not a shortlist"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    tmp_path: Path, manifest: Manifest, change: Callable[[Lexicon], Lexicon], sentence: str
) -> None:
    save(tmp_path, change(good(manifest)))
    with pytest.raises(ModelError, match=sentence):
        load_lexicon(tmp_path, manifest)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no archive at all"])
def test_a_broken_file_is_refused(tmp_path: Path, manifest: Manifest, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ModelError, match=r"is not a shortlist .* beamline shortlist"):
        load_lexicon(tmp_path, manifest)


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no shortlist"):
        load_lexicon(tmp_path, small_manifest())


def test_a_gpu_has_no_shortlists(tmp_path: Path, manifest: Manifest) -> None:
    device = CudaDevice(0, "none", "8.6", 0)
    with pytest.raises(ModelError, match="can't have a shortlist on a GPU"):
        make_backend(tmp_path, manifest, 1, Choice("cuda", (device,), ""), device, {}, shortlist=True)


def test_the_documented_way_to_switch_it_on_works_for_the_shipped_model(tmp_path: Path) -> None:
    """Its serving.toml has a table at the end: a line that is appended would be one of the decoding defaults."""
    page = (ROOT / "docs" / "shortlist.md").read_text(encoding="utf-8")
    command = shlex.split(next(line for line in page.splitlines() if "shortlist = true" in line), comments=True)
    shipped = Path(command.pop())
    copy = tmp_path / SETTINGS_FILE
    shutil.copy(ROOT / shipped, copy)
    before = read_settings(tmp_path)
    subprocess.run([*command, str(copy)], check=True)
    assert read_settings(tmp_path) == before.model_copy(update={"shortlist": True})
    assert before.defaults
