"""Arguments that can't be meant: told in a sentence, before anything is sent or lost."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from beamline.loadtest import command
from beamline.loadtest.errors import LoadTestError
from beamline.loadtest.report.files import prepare
from tests.support.processes import run_beamline


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    command.add_arguments(made)
    return made


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--target", "localhost"), "write HOST:PORT"),
        (("--fail-if", "speed>3"), "--fail-if can't be"),
        (("--fail-if", "p95>500"), "--fail-if 'p95>500': '500' needs a unit"),
        (("compare", "/nowhere.json"), "write compare A B"),
        (("measure",), "write compare A B"),
        (("--slo", "fast"), "write p95=500ms"),
        (("--clients", "2", "--sweep", "1,2"), "exclude each other"),
        (("--options", "beams=4"), "there is no option 'beams'"),
        (("--texts", "/nowhere.txt"), "can't be read"),
        (("--token-file", "/nowhere.txt"), "can't be read"),
        (("--tls-cert", "/nowhere.pem"), "go together"),
        (("--duration", "0"), "nothing to measure"),
        (("compare", "/nowhere.json", "/nowhere.json"), "can't be read"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(parser().parse_args(arguments)) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("beamline: ")
    assert sentence in found.err
    assert len(found.err.splitlines()) == 1


def test_the_server_is_the_environments_unless_the_command_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEAMLINE_TARGET", raising=False)
    assert parser().parse_args([]).target == "127.0.0.1:8001"
    monkeypatch.setenv("BEAMLINE_TARGET", "there:1")
    assert parser().parse_args([]).target == "there:1"
    assert parser().parse_args(["--target", "here:2"]).target == "here:2"
    assert "BEAMLINE_TARGET" in parser().format_help()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--bogus", "3"), "unrecognized arguments: --bogus"),
        (("--sweep", "5,a"), "argument --sweep: 'a' is no rate; write 5 or 5/s"),
        (("--workers", "two"), "argument --workers: 'two' is no count; write a whole number from 1 on"),
        (("--speed", "fast"), "argument --speed: 'fast' is no speed"),
        (("--allow-errors", "100"), "argument --allow-errors: '100' needs a unit; write 100%"),
        (("--deadline", "500"), "argument --deadline: '500' needs a unit (us, ms, s, m or h); write 500ms or 500s"),
    ],
)
def test_what_can_not_be_read_is_told(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_report_is_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("of an hour's work")
    with pytest.raises(LoadTestError, match="holds a report already; name another folder with --out, or give --ov"):
        prepare(tmp_path)
    assert (tmp_path / "report.json").read_text() == "of an hour's work"
    prepare(tmp_path, overwrite=True)
    prepare(tmp_path / "new")


def test_an_option_of_another_method_is_told_at_once() -> None:
    found = run_beamline("loadtest", "--method", "generate", "--options", "num_hypotheses=2")
    assert found.returncode == 2
    assert "there is no option 'num_hypotheses'" in found.stderr
