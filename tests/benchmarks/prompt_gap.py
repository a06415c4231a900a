"""`python -m tests.benchmarks.prompt_gap MODEL`: what running streams notice of a long prompt that is taken in.

Streams of greedy tokens run; then a prompt of 2,000 tokens comes. Printed are the gaps between a stream's tokens, alone
(before the prompt comes, and after its answer: a stream's steps get longer with its age) and while it is taken in, for
several slowdowns (`beamline serve --prompt-slowdown`), and with the prompt in one piece. Gaps are given in medians of
those alone, and the largest in medians of those meanwhile as well. The largest alone, and what the hypervisor took of
the CPUs, say what the machine does by itself. MODEL is a converted version's folder.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from beamline.serving.contract.manifest import read_manifest
from beamline.serving.engine import chunked_prefill as prompts
from beamline.serving.engine.core import Engine
from beamline.serving.engine.options import DecodingOptions
from beamline.serving.engine.outputs import Output, Piece
from beamline.serving.engine.request import Request
from beamline.serving.models.engines import EngineSettings, load_engine
from tests.benchmarks.table import print_table
from tests.support.engines import step

_FIRST_STEPS = 10  # until all of them run
_QUIET_STEPS = 200  # before the prompt comes
_HEADER = (
    "streams",
    "slowdown",
    "median alone",
    "largest alone",
    "median during",
    "99 % below",
    "largest",
    "largest / during",
    "above 3",
    "prompt took",
    "stolen",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    parser.add_argument("--streams", default="1,4", metavar="N,N")
    parser.add_argument("--slowdown", default="2,4,8", metavar="X,X")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-whole", action="store_true", help="leave the prompt in one piece out")
    options = parser.parse_args()
    slowdowns: list[float | None] = [float(part) for part in options.slowdown.split(",")]
    if not options.no_whole:
        slowdowns.append(None)
    rows: list[tuple[str, ...]] = [_HEADER]
    for count in map(int, options.streams.split(",")):
        rows += [_row(options.model, count, options.prompt, options.threads, slowdown) for slowdown in slowdowns]
    print_table(rows)


def _row(folder: Path, streams: int, length: int, threads: int, slowdown: float | None) -> tuple[str, ...]:
    manifest = read_manifest(folder)
    settings = EngineSettings(threads=threads, slots=streams + 1)
    if slowdown is not None:
        settings = replace(settings, prompt_slowdown=slowdown)
    engine = load_engine(folder, manifest, settings, lambda stats: None)
    if slowdown is None:
        engine._prefill._pace = _Unpaced(1.0)  # type: ignore[attr-defined]
    chance = random.Random(0)
    tokens = [word for word in range(manifest.vocabulary.target_size) if word not in manifest.vocabulary.eos_ids]

    def submit(size: int, new: int) -> tuple[list[float], list[object]]:
        """When its tokens come, and its answer."""
        times: list[float] = []
        answers: list[object] = []
        options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=new + 1, min_length=new + 2)
        source = tuple(chance.choices(tokens, k=size))

        def take(output: Output) -> None:
            if isinstance(output, Piece):
                times.append(time.perf_counter())
            else:
                answers.append(output)

        engine.submit(Request(source, options, take, streams=True))
        return times, answers

    running = [submit(8, manifest.limits.max_target_length - 16)[0] for _ in range(streams)]
    _step(engine, lambda: min(map(len, running)) >= _FIRST_STEPS)
    began = time.perf_counter()
    _step(engine, lambda: min(map(len, running)) >= _FIRST_STEPS + _QUIET_STEPS)
    before = _gaps(running, began)
    stolen = _stolen_seconds()
    came = time.perf_counter()
    late, answered = submit(length, 8)
    _step(engine, lambda: bool(late))
    during, took, stolen = _gaps(running, came), late[0] - came, _stolen_seconds() - stolen
    _step(engine, lambda: bool(answered))
    over, steps = time.perf_counter(), len(running[0])
    _step(engine, lambda: len(running[0]) >= steps + _QUIET_STEPS)
    alone = before + _gaps(running, over)
    usual = median(alone)
    return (
        str(streams),
        "in one piece" if slowdown is None else f"{slowdown:g}",
        f"{1000 * usual:.1f} ms",
        *(f"{gap / usual:.2f}" for gap in (max(alone), median(during), quantiles(during, n=100)[98], max(during))),
        f"{max(during) / median(during):.2f}",
        f"{sum(gap > 3 * usual for gap in during)} of {len(during)}",
        f"{took:.1f} s",
        f"{stolen:.1f} s",
    )


def _stolen_seconds() -> float:
    """What the hypervisor has taken of all CPUs, where the operating system knows."""
    times = Path("/proc/stat")
    return int(times.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if times.exists() else 0.0


class _Unpaced(prompts.Pace):
    def tokens(self, others_wait: bool) -> int:
        return 1 << 20


def _step(engine: Engine, done: Callable[[], bool]) -> None:
    while not done():
        step(engine)


def _gaps(streams: list[list[float]], since: float) -> list[float]:
    """Between two tokens of a stream, the second of which came after `since`."""
    return [after - before for told in streams for before, after in pairwise(told) if after > since]


if __name__ == "__main__":
    main()
