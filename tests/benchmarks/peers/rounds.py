"""The loop of a worker of `tests.benchmarks.in_process`: for every line of standard input, one pass over the lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def run(source: str, out: str, translate: Callable[[list[str]], list[str]]) -> None:
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    for _ in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        answers = translate(lines)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        Path(out).write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
        print(seconds, cpu, flush=True)
