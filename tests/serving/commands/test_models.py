from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.cli import main
from serving.commands import models
from tests.serving.disk import write_version


def listed(root: Path) -> int:
    return main(["models", "--repo", str(root)], {"models": lambda: models})


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_version(tmp_path, "de", 1)
    folder = write_version(tmp_path, "de", 2)
    parity = {"max_log_prob_difference": 1.5e-5, "beam_exact_share": 0.998}
    (folder / "parity.json").write_text(json.dumps(parity))
    write_version(tmp_path, "fr-long-name", 1)
    assert listed(tmp_path) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "versions", "task", "family", "size", "parity"]
    assert first.split()[:5] == ["de", "1,", "2", "translate", "fake"]
    assert first.endswith("log-probs within 1.5e-05, 99.8% beam-exact")
    assert second.endswith("none")
    assert head.index("versions") == first.index("1, 2")


def test_problems_are_listed_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_version(tmp_path, "de", 1)
    (folder / "parity.json").write_text("[]")
    (tmp_path / "half" / "1").mkdir(parents=True)
    assert listed(tmp_path) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1].endswith("unreadable")
    assert err == f"problem: {tmp_path}/half/1/manifest.json does not exist: the version is incomplete\n"


def test_an_empty_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path) == 0
    assert capsys.readouterr().out == f"no models in {tmp_path}\n"


def test_a_repository_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path / "nowhere") == 2
    assert "nowhere can't be read" in capsys.readouterr().err
