"""Somebody who follows a page word by word, in a folder of their own."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documents.pages import Block, Command
from tests.support.processes import PATIENCE, ROOT, beamline, environment

THE_PAGES_OWN = "this page's"  # the mark of a block that asks the server that the page has started

_SERVE = re.compile(r"\bbeamline serve\b")
_COPIED = ("beamline", "converters", "model_repo")
_LINKED = (".dockerignore", ".git")  # besides all that is not hidden
_PRINTS = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Addresses:
    grpc: str
    http: str
    metrics: str

    def put_into(self, text: str) -> str:
        """The documents name the ports that a server has by default."""
        for default, ours in (("8001", self.grpc), ("8000", self.http), ("8002", self.metrics)):
            text = text.replace(f"127.0.0.1:{default}", ours)
        return text


def programs(folder: Path) -> Path:
    """`beamline`, `python` and `grpcurl` as the documents call them."""
    folder.mkdir(parents=True)
    own = {"beamline": beamline(), "python": [sys.executable], "python3": [sys.executable]}
    if shutil.which("grpcurl") is None:
        own["grpcurl"] = [sys.executable, str(ROOT / "tests" / "documents" / "grpcurl.py")]
    for name, (program, *arguments) in own.items():
        (folder / name).write_text(f"#!/bin/sh\nexec '{program}' {_quoted(arguments)} \"$@\"\n")
        (folder / name).chmod(0o755)
    return folder


def _quoted(arguments: list[str]) -> str:
    return " ".join("'" + each.replace("'", "'\\''") + "'" for each in arguments)


def checkout(folder: Path) -> Path:
    """This project as somebody has it who has just fetched it: what a page writes stays in `folder`.

    What a page may change is a copy, and what its commands import is found in `folder` first.
    """
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in _COPIED:
            shutil.copytree(path, folder / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith(".") or path.name in _LINKED:
            (folder / path.name).symlink_to(path)
    return folder


def check_build(command: str, folder: Path) -> None:
    """What `docker build` would copy is there, and the folder's .dockerignore lets it in."""
    *_, context = shlex.split(command.partition("  #")[0])
    dockerfile = (folder / context / "Dockerfile").read_text()
    assert dockerfile.startswith(("FROM ", "#")), f"{command}: {dockerfile}"
    ignore = folder / context / ".dockerignore"
    let_in = ignore.read_text().splitlines() if ignore.exists() else None
    for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        for source in sources:
            assert (folder / context / source).exists(), f"{command}: there is no {source}"
            assert source == "." or let_in is None or f"!{source.rstrip('/')}" in let_in, (
                f"{command}: {source} is kept out"
            )


class Reader:
    def __init__(self, folder: Path, server: Callable[[str], Addresses]) -> None:
        self.folder = checkout(folder / "beamline")
        self._bin = programs(folder / "bin")
        (self.folder / ".venv-serve").mkdir()
        (self.folder / ".venv-serve" / "bin").symlink_to(self._bin)
        self._server = server
        self._own: Addresses | None = None  # that this page has started
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, block: Block, commands: list[Command]) -> None:
        """Runs a block of Python, or those of its commands."""
        asked = self._own if block.server == THE_PAGES_OWN else self._server(block.server)
        assert asked is not None, f"{block}: this page has started no server before"
        if block.language == "python":
            self._python(block, asked)
        for command in commands:
            if _SERVE.search(command.text):
                asked = self._serve(command)
            else:
                self._run(command, asked)

    def _python(self, block: Block, asked: Addresses) -> None:
        """In this process: starting another one takes longer than most blocks."""
        printed_text = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed_text):
            patch.chdir(self.folder)
            patch.setenv("BEAMLINE_TARGET", asked.grpc)
            exec(compile(asked.put_into(block.content), str(block), "exec"), {"__name__": "__main__"})
        printed = printed_text.getvalue().splitlines()
        assert printed, f"{block} prints nothing"
        for line in _PRINTS.findall(block.content):
            assert line in printed, f"{block}: {printed}"

    def _run(self, command: Command, asked: Addresses) -> None:
        text = asked.put_into(command.text)
        if "beamline loadtest" in text:  # half a minute of measuring shows no more than a second does here
            text = re.sub(r"--duration \S+|--warmup \S+", "", text)
            text = re.sub(r"loadtest (?!compare)", "loadtest --duration 1s --warmup 0s ", text)
            # A search on a busy machine: ten times the limit, and one rate.
            text = text.replace("--slo p95=500ms", "--slo p95=5s --rate 20 --max-rate 20")
        printed = self._completed(command.block, ["bash", "-euo", "pipefail", "-c", text], asked)
        if command.prints is not None:
            assert printed == command.prints, f"{command.block}: {command.text}"

    def _completed(self, block: Block, command: list[str], asked: Addresses) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self._environment(), "BEAMLINE_TARGET": asked.grpc},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {command[-1]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {**environment(), "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"}

    def _serve(self, command: Command) -> Addresses:
        """Starts it on ports that are free, and lets it serve for the rest of the page, or until the next one."""
        self._stack.close()
        text = _SERVE.sub("exec beamline serve --grpc-port 0 --http-port 0 --metrics-port 0 --threads 1", command.text)
        log = self.folder / "serve.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                ["bash", "-c", text],
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

        def end() -> None:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=PATIENCE)
            assert process.stdout is not None
            process.stdout.close()
            assert code == 0, f"{command.block}: {command.text} ended with {code}\n{log.read_text()}"

        self._stack.callback(end)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready "), f"{command.block}: {command.text}\n{log.read_text()}"
        found = dict(word.split("=") for word in ready.split()[1:])
        self._own = Addresses(found["grpc"], found["http"], found["metrics"])
        return self._own
