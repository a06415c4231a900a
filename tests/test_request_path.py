"""The tool that follows a request through the server finds the whole way, on every thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def paths() -> dict[str, list[str]]:
    """The lines that are printed for each call."""
    # As a file, as it is run on another tree.
    command = [sys.executable, str(ROOT / "tests" / "request_path.py"), "--fake"]
    found = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr
    sections = [section.splitlines() for section in found.stdout.split("\n\n") if section.strip()]
    return {lines[0].partition(":")[0]: lines[1:] for lines in sections}


@pytest.mark.parametrize(("call", "answer"), [("Translate", "TranslateResponse"), ("Generate", "GenerateReply")])
def test_it_sees_every_thread_and_what_carries_the_request(paths: dict[str, list[str]], call: str, answer: str) -> None:
    lines = paths[call]
    listed = [line.replace(" * ", " ").split() for line in lines if line.lstrip()[0].isdigit()]
    modules = [words[1] for words in listed]
    handling = [line.split()[2] for line in lines if line.lstrip()[0].isdigit() and " * " in line]
    carriers = [line.split()[1].rpartition(".")[2] for line in lines if line.lstrip().startswith("* ")]
    assert len(set(modules)) == len(modules) > 10
    assert not any(module.startswith("tests") for module in modules)
    assert any("[MainThread]" in line for line in lines)
    assert any("[engine]" in line for line in lines)
    assert carriers[0] == f"{call}Request"
    assert answer in carriers
    assert "beamline.serving.engine.core" in handling
    assert "beamline.serving.telemetry.metrics" in set(modules) - set(handling)
