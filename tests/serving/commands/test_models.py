from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from beamline.serving.cli import main
from beamline.serving.commands import models, translate
from beamline.serving.config import ServeConfig
from beamline.serving.server import Server
from tests.serving.disk import write_version
from tests.serving.doubles import EngineDoubles, started


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


def test_broken_settings_are_listed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that a server would find in them without loading the model."""
    settings = {
        "fine": "slots = 3\n[defaults]\nbeam_size = 2",
        "key": "slotz = 3",
        "toml": "slots =",
        "version": "versions = [1, 7]",
        "precision": 'precision = "int8"',
        "defaults": "[defaults]\nbeam_size = 99",
    }
    for name, content in settings.items():
        write_version(tmp_path, name, 1)
        (tmp_path / name / "serving.toml").write_text(content)
    assert listed(tmp_path) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + len(settings)
    problems = {Path(line.removeprefix("problem: ").split()[0]).parent.name: line for line in err.splitlines()}
    assert set(problems) == set(settings) - {"fine"}
    assert "has unknown keys: slotz; known are versions, slots" in problems["key"]
    assert "is not TOML" in problems["toml"]
    assert "asks for version 7, which is not there" in problems["version"]
    assert "asks for precision int8" in problems["precision"]
    assert "does not fit version 1" in problems["defaults"]


def test_a_folder_or_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["models", "--repo", str(tmp_path), "--target", "127.0.0.1:1"]
    assert main(given, {"models": lambda: models}) == 2
    assert "give --target or --repo, not both" in capsys.readouterr().err


def test_an_empty_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path) == 0
    assert capsys.readouterr().out == f"no models in {tmp_path}\n"


def test_a_repository_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path / "nowhere") == 2
    assert "nowhere can't be read" in capsys.readouterr().err


async def test_a_running_server_is_asked_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2):
        write_version(tmp_path, "de", version)
    (write_version(tmp_path, "fr", 1) / "weights.bin").write_bytes(b"short")
    config = ServeConfig(repository=tmp_path, grpc_port=0, metrics_port=0)

    async with started(Server(config, EngineDoubles().makers)) as server:

        async def asked(*arguments: str) -> tuple[int, list[list[str]], str]:
            line = ["models", "--target", server.grpc_address, *arguments]
            code = await asyncio.to_thread(main, line, {"models": lambda: models})
            out, err = capsys.readouterr()
            return code, [row.split() for row in out.splitlines()[1:]], err

        code, rows, _ = await asked()
        assert (code, rows[0]) == (0, ["de", "2", "READY"])
        assert rows[1][:4] == ["fr", "1", "UNAVAILABLE", "fr/1/weights.bin"]
        assert (await asked("--load", "de/1"))[1][0] == ["de", "1", "READY"]
        assert (await asked("--unload", "de"))[1][0][:3] == ["de", "UNAVAILABLE", "it"]
        line = ["translate", "--target", server.grpc_address, "--model", "de", "a"]
        assert await asyncio.to_thread(main, line, {"translate": lambda: translate}) == 2
        refused = "beamline: model 'de' is not served now: it was unloaded\n"
        assert capsys.readouterr().err == refused  # not "nothing answers": it has answered
        assert (await asked("--load", "de"))[1][0] == ["de", "2", "READY"]
        unknown = "beamline: the repository has no model 'nl'; it has de, fr\n"
        assert (await asked("--load", "nl"))[2] == unknown
        assert (await asked("--load", "fr"))[2].startswith("beamline: fr could not be loaded as asked")
        assert "write NAME or NAME/VERSION" in (await asked("--load", "de/x"))[2]
    assert main(["models", "--load", "de"], {"models": lambda: models}) == 2
    assert main(["models", "--target", "127.0.0.1:1"], {"models": lambda: models}) == 2
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().err
