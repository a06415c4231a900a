"""A real server with `--device cuda` over the stub: calls that join, leave and are cancelled, and models that come and
go; then nothing of CUDA's is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from beamline import Client
from tests.cuda_stub.conftest import EN_DE, EN_DE_GRU
from tests.support.cuda_stub.stub import Stub
from tests.support.processes import PATIENCE, ROOT, ServerProcess, environment, eventually, serving

PROGRAM = (sys.executable, "-m", "tests.support.cuda_stub.beamline")
LINES = ["Save the file.", "Click the button to go on with the next page of the form.", "No.", "Where is it?"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, folder in (("en-de", EN_DE), ("en-de-gru", EN_DE_GRU)):
        shutil.copytree(folder, tmp_path / "repository" / name / folder.name)
    return tmp_path / "repository"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Of the server's process."""
    path = tmp_path / "control"
    path.touch()
    monkeypatch.setenv("CUDA_STUB_CONTROL", str(path))
    stub = Stub(path)
    yield stub
    assert stub.wrong == []


def admin(server: ServerProcess, *arguments: str) -> None:
    command = [*PROGRAM, "models", "--target", server.grpc, *arguments]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr


def talk(server: ServerProcess, model: str) -> int:
    """How many calls were answered."""

    def call(number: int) -> int:
        with Client(server.grpc) as client:
            if number % 5 == 4:  # a stream that its reader leaves
                with closing(client.translate_stream(LINES[1], model=model)) as pieces:
                    next(iter(pieces), None)
                return 1
            beams = (4, 1, 2, 3)[number % 4]
            found = client.translate(
                LINES[: 1 + number % 4], model=model, beam_size=beams, no_repeat_ngram_size=number % 3
            )
            return len(found)

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(call, range(24)))


def test_models_come_and_go_and_leave_nothing(repository: Path, control: Stub, tmp_path: Path) -> None:
    arguments = ("--repo", str(repository), "--device", "cuda", "--max-slots", "8")
    with serving(tmp_path / "log", *arguments, program=PROGRAM) as server:
        for model in ("en-de", "en-de-gru"):
            assert talk(server, model) > 24
        assert 'beamline_gpu_utilisation_ratio{gpu="0"} 0.37' in server.get("/metrics")[1]
        for model in ("en-de", "en-de-gru"):
            admin(server, "--unload", model)

        def empty() -> bool:
            held = control.held
            return not (any(held.device_bytes) or held.pinned_bytes or held.streams or held.events or held.graphs)

        eventually(empty, f"all is given back: {control.held}")
        for _ in range(2):
            admin(server, "--load", "en-de")
            talk(server, "en-de")
        admin(server, "--unload", "en-de")
        eventually(empty, f"all is given back: {control.held}")
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_server_whose_gpu_is_lost_ends(repository: Path, control: Stub, tmp_path: Path) -> None:
    """Its calls get an error instead of waiting, and the process ends, so that somebody starts another one."""
    arguments = ("--repo", str(repository), "--load", "en-de", "--device", "cuda", "--max-slots", "8")
    with serving(tmp_path / "log", *arguments, "--watchdog-seconds", "5", program=PROGRAM) as server:
        assert talk(server, "en-de") > 24
        control.lose(0)
        with Client(server.grpc, retries=0) as client, pytest.raises(Exception, match=r"device|step|ending"):
            client.translate(LINES, model="en-de", timeout=60)
        assert server.process.wait(timeout=PATIENCE) != 0
    assert "the device of en-de is lost" in (tmp_path / "log").read_text()
