"""The command `beamline` as real processes: installed or straight from the sources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from beamline.serving.cli import GROUP, installed_commands

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; only ever used up by a failure

_FROM_SOURCES = """
import sys
from functools import partial
from importlib import import_module
from beamline.serving.cli import main
sys.exit(main(None, {{name: partial(import_module, module) for name, module in {modules!r}.items()}}))
"""


def beamline(*arguments: str) -> list[str]:
    """A command line."""
    if "serve" in installed_commands():
        return [sys.executable, "-m", "beamline.serving.cli", *arguments]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = _FROM_SOURCES.format(modules=project["entry-points"][GROUP])
    return [sys.executable, "-c", code, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_beamline(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; `text` is its standard input."""
    return subprocess.run(
        beamline(*arguments),
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env=environment(),
        timeout=5 * PATIENCE,
        check=False,
    )


def eventually(condition: Callable[[], bool], what: str) -> None:
    """For what another process does in its own time, which looking at it without a pause would take from it."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"never happened: {what}"
        time.sleep(0.02)


@dataclass(frozen=True)
class Metrics:
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.samples.items() if found == name and has >= wanted)


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[str]
    grpc: str
    http: str  # the JSON gateway
    metrics_address: str  # and health
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.metrics_address}{path}", timeout=PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> Metrics:
        status, content = self.get("/metrics")
        assert status == 200
        return Metrics(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(content)
                for sample in family.samples
            }
        )

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def stop(self) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)


@contextmanager
def serving(
    log: Path, *arguments: str, before: Callable[[], None] | None = None, program: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """A server that answers. What it says on standard error goes to `log`. At the end it is drained, and must
    exit with 0, unless the test has ended it before. `before` is called in its process; `program` is run in the place
    of `beamline`."""
    ports = ("--grpc-port", "0", "--metrics-port", "0", "--http-port", "0")
    command = [*(program or beamline()), "serve", *ports, "--drain-delay", "0", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment(), preexec_fn=before
        ) as process,
    ):
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            assert ready.startswith("ready "), log.read_text()
            addresses = dict(word.split("=") for word in ready.split()[1:])
            server = ServerProcess(process, addresses["grpc"], addresses["http"], addresses["metrics"], log)
            yield server
            if process.poll() is None:
                assert server.stop() == 0, log.read_text()
        finally:
            process.kill()
