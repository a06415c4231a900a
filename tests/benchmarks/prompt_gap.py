"""`python -m tests.benchmarks.prompt_gap MODEL`: what running streams notice of a long prompt that is taken in.

Streams of greedy tokens run; then a prompt of 2,000 tokens comes. Printed are the gaps between a stream's tokens,
before and while the prompt is taken in, for several slowdowns (`beamline serve --prompt-slowdown`), and with the prompt
in one piece. The largest gap is given in medians of those before and of those meanwhile; beside it stands the largest
before, when there was no prompt: what the machine does by itself. MODEL is a converted version's folder.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from serving.engine import prompts
from serving.engine.build import EngineSettings, load_engine
from serving.engine.core import Engine
from serving.engine.request import DecodingOptions, Piece, Request
from serving.manifest import read_manifest
from tests.benchmarks.report import print_table

_FIRST_STEPS = 10  # until all of them run
_QUIET_STEPS = 200  # before the prompt comes
_HEADER = (
    "streams",
    "slowdown",
    "median before",
    "largest before",
    "median during",
    "99 % below",
    "largest",
    "in medians before",
    "in medians during",
    "prompt took",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    parser.add_argument("--streams", default="1,4", metavar="N,N")
    parser.add_argument("--slowdown", default="2.3,4,8", metavar="X,X")
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
        engine._intake._pace = _Unpaced(1.0)  # type: ignore[attr-defined]
    chance = random.Random(0)
    tokens = [word for word in range(manifest.vocabulary.target_size) if word not in manifest.vocabulary.eos_ids]

    def submit(size: int, new: int) -> list[float]:
        told: list[float] = []
        options = DecodingOptions(beam_size=1, num_hypotheses=1, max_length=new + 1, min_length=new + 2)
        source = tuple(chance.choices(tokens, k=size))

        def tell(piece: Piece) -> None:
            told.append(time.perf_counter())

        engine.submit(Request(source, options, lambda answer: None, progress=tell))
        return told

    running = [submit(8, manifest.limits.max_target_length - 16) for _ in range(streams)]
    _step(engine, lambda: min(map(len, running)) >= _FIRST_STEPS)
    began = time.perf_counter()
    _step(engine, lambda: min(map(len, running)) >= _FIRST_STEPS + _QUIET_STEPS)
    before = _gaps(running, began)
    came = time.perf_counter()
    late = submit(length, 8)
    _step(engine, lambda: bool(late))
    during = _gaps(running, came)
    return (
        str(streams),
        "in one piece" if slowdown is None else f"{slowdown:g}",
        *map(_milliseconds, (median(before), max(before), median(during), quantiles(during, n=100)[98], max(during))),
        f"{max(during) / median(before):.2f}",
        f"{max(during) / median(during):.2f}",
        f"{late[0] - came:.1f} s",
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


class _Unpaced(prompts.Pace):
    def tokens(self, others_wait: bool) -> int:
        return 1 << 20


def _step(engine: Engine, done: Callable[[], bool]) -> None:
    while not done():
        engine.step()


def _gaps(streams: list[list[float]], since: float) -> list[float]:
    """Between two tokens of a stream, the second of which came after `since`."""
    return [after - before for told in streams for before, after in pairwise(told) if after > since]


if __name__ == "__main__":
    main()
