from __future__ import annotations

import argparse
import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.serving.cli import Command, Loader, main
from beamline.serving.errors import BeamlineError
from beamline.version import beamline_version
from tests.support.processes import ROOT


class Greet:
    HELP = "say hello"

    def __init__(self, failure: BaseException | None = None) -> None:
        self._failure = failure

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--times", type=int, default=1)
        parser.add_argument_group("how").add_argument("--pause", type=float, default=0.0)

    def run(self, args: argparse.Namespace) -> int:
        if self._failure is not None:
            raise self._failure
        print(f"hello {args.name}" * args.times)
        return 7


def commands(failure: BaseException | None = None) -> dict[str, Loader]:
    def greet() -> Command:
        return Greet(failure)

    def convert() -> Command:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    return {"greet": greet, "convert": convert}


def test_a_command_gets_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you"], commands()) == 7
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--times", "two", "argument --times: 'two' is no whole number; write it in digits, as 4"),
        ("--times", "1.5", "argument --times: '1.5' is no whole number; write it in digits, as 4"),
        ("--pause", "long", "argument --pause: 'long' is no number; write it in digits, as 4 or 0.5"),
    ],
)
def test_a_wrong_number_is_refused_in_our_own_words(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["greet", "you", option, value], commands())
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"beamline greet: error: {sentence}"
    assert main(["greet", "you", "--times", "2", "--pause", "0.5"], commands()) == 7
    assert capsys.readouterr().out == "hello youhello you\n"


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"], commands())
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "greet say hello" in out
    assert "convert needs torch, which is not installed" in out


def test_no_command_shows_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], commands()) == 2
    assert "greet" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["gret"], commands())
    assert caught.value.code == 2
    assert "invalid choice: 'gret'" in capsys.readouterr().err


def test_a_command_without_its_extra_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "x"], commands()) == 2
    assert capsys.readouterr().err == (
        "beamline: beamline convert needs torch, which is not installed: "
        "it belongs in an environment of its own; in this project's folder, python3 -m venv .venv-convert, "
        "then .venv-convert/bin/pip install -c constraints.txt torch (docs/tutorial.md says which build), "
        "then .venv-convert/bin/pip install -c constraints.txt '.[cpu,convert]', and call .venv-convert/bin/beamline\n"
    )


def test_what_serving_needs_comes_with_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("onnx", "onnxruntime"):
        assert main(["greet", "x"], commands(ModuleNotFoundError(module, name=module))) == 2
        assert "pip install '.[cpu]'\n" in capsys.readouterr().err


def test_a_full_disk_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "x"], commands(OSError(errno.ENOSPC, "No space left on device", "a/weights.bin"))) == 2
    said = capsys.readouterr().err
    assert (
        said
        == "beamline: there is no space left for a/weights.bin (No space left on device): make some, and try again\n"
    )
    with pytest.raises(PermissionError):
        main(["greet", "x"], commands(PermissionError(errno.EACCES, "no")))


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError):
        main(["greet", "you"], commands(ModuleNotFoundError("no", name="beamline.serving.nothing")))


def test_our_errors_are_a_sentence_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you"], commands(BeamlineError("it is broken"))) == 2
    assert capsys.readouterr().err == "beamline: it is broken\n"


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you"], commands(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["greet", "you"], commands(BrokenPipeError())) == 0
        print("goes nowhere")
    assert (tmp_path / "out").read_text() == ""


def test_a_closed_pipe_that_shows_only_when_flushed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Closed(io.TextIOWrapper):
        def flush(self) -> None:
            raise BrokenPipeError

    with (tmp_path / "out").open("wb") as file:
        monkeypatch.setattr(sys, "stdout", Closed(file))
        assert main(["greet", "you"], commands()) == 0
        monkeypatch.undo()


def test_it_is_a_module_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "beamline", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"beamline {beamline_version()}\n"
