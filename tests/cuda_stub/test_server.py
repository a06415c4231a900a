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
from typing import Any

import pytest

from beamline import Client
from beamline.serving.commands.serve import FAILED
from beamline.serving.contract.manifest import PRECISIONS, AnyManifest, PooledManifest, read_any_manifest
from tests.cuda_stub.conftest import EN_DE, EN_DE_GRU, MADE
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


def put(version: Path, repository: Path, name: str, number: int) -> None:
    """A model of that name into a repository; complete or absent, as a conversion does it."""
    made, target = repository / ".made", repository / name / str(number)
    shutil.copytree(version, made)
    manifest = read_any_manifest(version).model_copy(update={"name": name, "version": number})
    (made / "manifest.json").write_text(manifest.to_json())
    target.parent.mkdir(exist_ok=True)
    made.rename(target)


def is_empty(control: Stub) -> bool:
    held = control.held
    kept = (held.pinned_bytes, held.streams, held.events, held.graphs, held.handles, held.library_handles)
    return not (any(held.device_bytes) or any(kept))


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
        with ThreadPoolExecutor(1) as beside:  # a new version takes the place of one that is called
            talking = beside.submit(talk, server, "en-de")
            put(EN_DE, repository, "en-de", int(EN_DE.name) + 1)
            admin(server, "--load", "en-de")
            assert talking.result() > 24
        assert talk(server, "en-de") > 24
        for model in ("en-de", "en-de-gru"):
            admin(server, "--unload", model)
        eventually(lambda: is_empty(control), f"all is given back: {control.held}")
        for _ in range(2):
            admin(server, "--load", "en-de")
            talk(server, "en-de")
        admin(server, "--unload", "en-de")
        eventually(lambda: is_empty(control), f"all is given back: {control.held}")
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_is_served(precision: str, control: Stub, tmp_path: Path) -> None:
    """One model of each, all at once: calls of every kind, one of them left by its reader; then nothing is left."""
    served: dict[str, AnyManifest] = {}
    (tmp_path / "repository").mkdir()
    for version in sorted(MADE.glob(f"families/*/*/{precision}")):
        name, manifest = version.parts[-3], read_any_manifest(version)
        if name not in served and not getattr(manifest, "feature_width", 0) and "relu" not in version.parts[-2]:
            served[name] = manifest
            put(version, tmp_path / "repository", name, 1)
    arguments = ("--repo", str(tmp_path / "repository"), "--device", "cuda", "--max-slots", "4")
    with serving(tmp_path / "log", *arguments, program=PROGRAM) as server:
        with Client(server.grpc) as client:
            for name, manifest in served.items():
                call_all(client, name, manifest)
        for name in served:
            admin(server, "--unload", name)
        eventually(lambda: is_empty(control), f"all is given back: {control.held}")
    assert "Traceback" not in (tmp_path / "log").read_text()


SHORT = [line[:6] for line in LINES]  # some of the models read 32 tokens at most, and know letters alone


def call_all(client: Client, model: str, manifest: AnyManifest) -> None:
    if isinstance(manifest, PooledManifest):
        assert len(client.embed(SHORT, model=model)) == len(SHORT)
    elif manifest.task == "generate":
        for beams in (1, 4):
            assert len(client.generate(SHORT, model=model, beam_size=beams, max_tokens=24)) == len(SHORT)
        with closing(client.generate_stream(SHORT[1], model=model, max_tokens=24)) as pieces:
            next(iter(pieces), None)
        assert len(client.score(SHORT, model=model)) == len(SHORT)
    else:
        named = languages_of(manifest)
        for beams in (1, 4):
            found = client.translate(SHORT, model=model, beam_size=beams, max_length=24, **named)
            assert len(found) == len(SHORT)
        with closing(client.translate_stream(SHORT[1], model=model, max_length=24, **named)) as pieces:
            next(iter(pieces), None)
        assert len(client.score(SHORT, source=SHORT, model=model, **named)) == len(SHORT)


def languages_of(manifest: AnyManifest) -> dict[str, Any]:
    """What a call has to name: the first of each, of a model that knows several."""
    known = getattr(manifest, "languages", None)
    if known is None:
        return {}
    sides = {"source_language": known.source, "target_language": known.target}
    return {name: languages[0].code for name, languages in sides.items() if languages}


def test_a_server_whose_gpu_is_lost_ends(repository: Path, control: Stub, tmp_path: Path) -> None:
    """Its calls get an error instead of waiting, and the process ends, so that somebody starts another one."""
    arguments = ("--repo", str(repository), "--load", "en-de", "--device", "cuda", "--max-slots", "8")
    with serving(tmp_path / "log", *arguments, "--watchdog-seconds", "5", program=PROGRAM) as server:
        assert talk(server, "en-de") > 24
        control.lose(0)
        with Client(server.grpc, retries=0) as client, pytest.raises(Exception, match=r"device|step|ending"):
            client.translate(LINES, model="en-de", timeout=60)
        assert server.process.wait(timeout=PATIENCE) == FAILED  # in good order: no session of ONNX Runtime's is closed
    assert "the device of en-de is lost" in (tmp_path / "log").read_text()
