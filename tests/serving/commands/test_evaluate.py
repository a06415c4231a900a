from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from beamline.serving.cli import main
from beamline.serving.commands import evaluate
from tests.serving.doubles import EngineDouble, running

COMMANDS = {"eval": lambda: evaluate}
LINES = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(100)]


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


async def evaluated(source: str, reference: str, *arguments: str) -> int:
    async with running(EngineDouble()) as server:
        line = ["eval", "--target", server.grpc_address, "--source", source, "--reference", reference, *arguments]
        return await asyncio.to_thread(main, line, COMMANDS)


async def test_an_echo_is_a_perfect_translation_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", LINES)
    assert await evaluated(source, source, "--output", str(tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert out.startswith("BLEU  100.00")
    assert "chrF  100.00" in out
    assert "100 lines in" in out
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == LINES


async def test_a_worse_one_scores_lower_and_what_is_refused_counts_as_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "source", [*LINES[:50], "x" * (2 << 20)])  # more than a server takes
    reference = write(tmp_path / "reference", [line.replace("lazy dog", "sleepy cat") for line in LINES[:51]])
    assert await evaluated(source, reference, "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert 10 < found["bleu"] < 90
    assert found["lines"] == 51
    assert found["refused"] == 1
    assert "line 51: " in err


@pytest.mark.parametrize(
    ("source", "reference", "sentence"),
    [(["a"], ["a", "b"], "has 1 lines and"), ([], [], "is empty")],
)
def test_mistakes(
    tmp_path: Path, source: list[str], reference: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--source", write(tmp_path / "s", source), "--reference", write(tmp_path / "r", reference)]
    assert main(["eval", *files], COMMANDS) == 2
    assert sentence in capsys.readouterr().err


def test_it_serves_a_repository_for_the_occasion(model_repository: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", ["one two three", "four"])
    out = tmp_path / "out"
    line = ["eval", "--repo", str(model_repository), "--source", source, "--reference", source, "--output", str(out)]
    assert main(line, COMMANDS) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2
