"""The server under test: ended and started again on the same ports, and what was seen of each of its processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import ROOT, beamline, environment

PATIENCE = 120.0


@dataclass
class Sample:
    seconds: float  # since the process began
    resident: int
    files: int


@dataclass
class Life:
    """One process."""

    process: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)  # codes that clients got from it, by API
    uncertain: int = 0  # calls of which no client knows what became: given up, or of another life

    def saw(self, code: str) -> None:
        self.seen[code] = self.seen.get(code, 0) + 1

    def sample(self) -> None:
        folder = Path(f"/proc/{self.process.pid}")
        resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS:"))
        files = len(os.listdir(folder / "fd"))
        self.samples.append(Sample(time.monotonic() - self.began, int(resident.split()[1]) * 1024, files))


class ChaosServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.repository = folder / "repository"
        self.grpc, self.http, self.metrics = (f"127.0.0.1:{port}" for port in _free_ports(3))
        self.lives: list[Life] = []

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def make_repository(self) -> None:
        for name in ("en-de", "copy"):
            add_model(self.repository, name)

    async def start(self) -> None:
        options = ["--repo", str(self.repository), "--threads", "1", "--max-slots", "8", "--max-queue", "16"]
        ports = [
            word
            for option, address in (("grpc", self.grpc), ("http", self.http), ("metrics", self.metrics))
            for word in (f"--{option}-port", address.rpartition(":")[2])
        ]
        command = beamline("serve", *options, *ports, "--watch", "1", "--drain-delay", "0.5", "--drain-seconds", "20")
        log = (self._folder / f"log-{len(self.lives):03}.txt").open("w")
        with log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment()
            )
        assert process.stdout is not None
        ready = await asyncio.to_thread(process.stdout.readline)
        assert ready.startswith("ready "), (self._folder / f"log-{len(self.lives):03}.txt").read_text()
        self.lives.append(Life(process))

    async def end(self, number: signal.Signals) -> int:
        """Its exit code."""
        process = self.life.process
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, PATIENCE)

    def counted(self) -> dict[str, float]:
        """Refusals by reason, and calls by code (`code:OK`)."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "beamline_refused_total":
                    found[sample.labels["reason"]] = sample.value
                elif sample.name == "beamline_calls_total":
                    code = f"code:{sample.labels['code']}"
                    found[code] = found.get(code, 0) + sample.value
        return found


def add_model(repository: Path, name: str) -> None:
    """A copy of en-de under another name: written beside, and renamed, as a deployment does it."""
    source = ROOT / "model_repo" / "en-de"
    version = next(each for each in sorted(source.iterdir()) if each.name.isdigit())
    staged = repository / f".new-{name}"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(version, staged / version.name)
    manifest = staged / version.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"name": "en-de"', f'"name": "{name}"', 1))
    settings = (source / "serving.toml").read_text()
    (staged / "serving.toml").write_text(settings if name == "en-de" else settings.replace("default = true", ""))
    old = repository / f".old-{name}"
    shutil.rmtree(old, ignore_errors=True)
    if (repository / name).exists():
        (repository / name).rename(old)
    staged.rename(repository / name)
    shutil.rmtree(old, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]
