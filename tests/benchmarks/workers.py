"""One process per system, which answers one question at a time and sleeps in between."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.benchmarks.made import ROOT
from tests.benchmarks.shape import TARGET_LENGTH


@dataclass(frozen=True)
class Answer:
    seconds: float
    tokens: list[list[int]]
    rss_mb: float
    foreign: float  # the share of the machine's CPU time that others took meanwhile
    details: dict[str, Any] = field(default_factory=dict)


def busy_seconds() -> float:
    """CPU time that anybody on this machine has used so far, and what its host took from it; 0 where unknown."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    except OSError:
        return 0.0
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float) -> None:
    """Until others leave the machine alone for a moment, but no longer than so many seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        busy = busy_seconds()
        time.sleep(0.3)
        if busy_seconds() - busy <= 0.06:
            return


class Worker:
    def __init__(self, name: str, python: Path | str, module: str, arguments: Sequence[object], threads: int) -> None:
        self.name = name
        self.idle_cpu = self.idle_wall = 0.0
        self._answered: tuple[float, float] | None = None
        self._process = subprocess.Popen(
            [python, "-m", f"tests.benchmarks.peers.{module}", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours alone
        )
        self.version = str(self._read()["version"])

    def ask(self, source: list[list[int]], beam: int) -> Answer:
        assert self._process.stdin is not None
        self._note_idleness()
        question = {"source": source, "beam": beam, "target_length": TARGET_LENGTH}
        began, own, busy = time.monotonic(), self._cpu_seconds(), busy_seconds()
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        content = self._read()
        self._answered = (time.monotonic(), self._cpu_seconds())
        others = busy_seconds() - busy - (self._answered[1] - own)
        foreign = max(0.0, others) / (self._answered[0] - began) / (os.cpu_count() or 1)
        seconds, tokens, rss = content.pop("seconds"), content.pop("tokens"), content.pop("rss_mb")
        return Answer(seconds, tokens, rss, foreign, content)

    @property
    def idle_share(self) -> float:
        """How much of a core it has used while it had nothing to do."""
        return self.idle_cpu / self.idle_wall if self.idle_wall else 0.0

    def _note_idleness(self) -> None:
        if self._answered is not None:
            self.idle_wall += time.monotonic() - self._answered[0]
            self.idle_cpu += self._cpu_seconds() - self._answered[1]

    def _cpu_seconds(self) -> float:
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        fields = status.rpartition(")")[2].split()  # from the third on
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker of {self.name} has died; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
