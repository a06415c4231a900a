"""A conversion that is killed, in a process of its own: no server ever loads what it leaves."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from beamline.converters import command
from beamline.converters.families import converter_for
from beamline.serving.cli import INTERRUPTED, main
from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.models.repository import scan, verify
from tests.support.checkpoints import EOS
from tests.support.engines import decode, make_engine, results
from tests.support.processes import PATIENCE, ROOT, beamline, environment

KILLS = 15


@contextmanager
def converting(source: Path, repository: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = beamline("convert", str(source), "--name", "de", "--repo", str(repository))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_one_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("beamline.converters.families.any_converter_for", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay behind the test
    arguments = ["convert", "x", "--name", "de", "--repo", str(tmp_path)]
    assert main(arguments, {"convert": lambda: command}) == INTERRUPTED
    assert capsys.readouterr().err == "beamline: interrupted: nothing was written\n"


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def check_listed_only_if_complete(repository: Path) -> int:
    """How many versions there are; each of them verifies, loads and decodes."""
    if not repository.is_dir():
        return 0
    versions = scan(repository).models.get("de", ())
    for version in versions:
        verify(version.folder, version.manifest)
        engine = make_engine(version.folder, read_manifest(version.folder), slots=1)
        options = DecodingOptions(beam_size=2, num_hypotheses=1, max_length=6)
        results(decode(engine, [((5, 6, EOS), options)]))
    return len(versions)


@pytest.mark.usefixtures("quick_conversion")
@pytest.mark.parametrize("name", ["weights.bin", pytest.param("encoder.onnx", marks=pytest.mark.full)])
def test_a_killed_conversion_leaves_no_version(reference_source: Path, tmp_path: Path, name: str) -> None:
    """At a random moment after this file has appeared. (What later kills leave, test_conversion.py looks at.)"""
    chance = random.Random(name)
    with converting(reference_source, tmp_path) as process:
        while not any((tmp_path / "de").glob(f"*/{name}")):
            assert not ended_within(process, 0.01)
        ended_within(process, chance.uniform(0, 3))
        process.kill()
    complete = check_listed_only_if_complete(tmp_path)
    assert complete <= 1
    assert complete or process.returncode == -signal.SIGKILL
    # The next one cleans up, and is the next version.
    manifest, _ = converter_for(reference_source).convert("de", tmp_path)
    assert manifest.version == complete + 1
    assert not list((tmp_path / "de").glob(".*"))
    assert check_listed_only_if_complete(tmp_path) == complete + 1


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quick_conversion")
def test_kills_all_over_a_conversion(reference_source: Path, tmp_path: Path) -> None:
    """Into one repository, so that each also meets what the ones before it have left."""
    began = time.monotonic()
    with converting(reference_source, tmp_path) as process:
        assert process.wait(timeout=4 * PATIENCE) == 0
    duration = time.monotonic() - began
    assert check_listed_only_if_complete(tmp_path) == 1
    chance = random.Random(0)
    complete = 1
    for number in range(KILLS):
        moment = duration * (number + chance.random()) / KILLS
        with converting(reference_source, tmp_path) as process:
            finished = ended_within(process, moment)
            process.kill()
            process.wait()
        found = check_listed_only_if_complete(tmp_path)
        # It may have been complete, and killed before it could say so.
        assert complete + finished <= found <= complete + 1
        complete = found
        assert len(list((tmp_path / "de").glob(".staging-*"))) <= 1  # the one that was just killed
    manifest, _ = converter_for(reference_source).convert("de", tmp_path)
    assert manifest.version == complete + 1
    assert not list((tmp_path / "de").glob(".*"))


FEW_BYTES = 100_000  # fewer than the weights have


@pytest.mark.full
def test_a_disk_that_is_full_is_told_and_nothing_is_left(reference_source: Path, tmp_path: Path) -> None:
    def limit_files() -> None:
        """A file that grows beyond it is an error, as on a full disk, and not a signal."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))

    command = beamline("convert", str(reference_source), "--name", "de", "--repo", str(tmp_path / "repository"))
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, preexec_fn=limit_files
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "there is no space left" in ended.stderr.splitlines()[-1]
    assert not list((tmp_path / "repository").iterdir())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_interrupted_conversion_cleans_up(reference_source: Path, tmp_path: Path) -> None:
    with converting(reference_source, tmp_path) as process:
        while not (tmp_path / "de").exists():
            assert not ended_within(process, 0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == INTERRUPTED
    assert list(tmp_path.iterdir()) == []
