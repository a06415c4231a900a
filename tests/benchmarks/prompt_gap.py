"""`python -m tests.benchmarks.prompt_gap MODEL`: what running streams notice of a long prompt that is taken in.

Streams of greedy tokens run; then a prompt of 2,000 tokens comes. Printed are the gaps between a stream's tokens before
and while the prompt is taken in, the largest of them in medians of those before (on a shared machine the very largest
is often somebody else's doing). The same once more with the prompt in one piece
shows what chunks are for. MODEL is a converted version's folder.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from serving.engine import prompts
from serving.engine.build import EngineSettings, load_engine
from serving.engine.core import Engine
from serving.engine.request import DecodingOptions, Piece, Request
from serving.manifest import read_manifest
from tests.benchmarks.report import print_table

_QUIET_STEPS = 30  # before the prompt comes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=2000, metavar="TOKENS")
    parser.add_argument("--streams", default="1,4", metavar="N,N")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-whole", action="store_true", help="leave the prompt in one piece out")
    options = parser.parse_args()
    header = ("streams", "prompt", "gap before", "gap during", "99 % below", "largest", "prompt took")
    rows: list[tuple[str, ...]] = [header]
    for count in map(int, options.streams.split(",")):
        for whole in (False, True)[: 1 if options.no_whole else 2]:
            rows.append(_row(options.model, count, options.prompt, options.threads, whole))
    print_table(rows)


def _row(folder: Path, streams: int, length: int, threads: int, whole: bool) -> tuple[str, ...]:
    manifest = read_manifest(folder)
    engine = load_engine(folder, manifest, EngineSettings(threads=threads, slots=streams + 1), lambda stats: None)
    if whole:
        engine._intake._pace = _Unpaced()  # type: ignore[attr-defined]
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
    _step(engine, lambda: min(map(len, running)) > _QUIET_STEPS)
    before = _gaps(running, 0.0)
    came = time.perf_counter()
    late = submit(length, 8)
    _step(engine, lambda: bool(late))
    during = _gaps(running, came)
    return (
        str(streams),
        "whole" if whole else "in chunks",
        f"{1000 * median(before):.1f} ms",
        f"{1000 * median(during):.1f} ms",
        _in_medians(quantiles(during, n=100)[98], before),
        _in_medians(max(during), before),
        f"{late[0] - came:.1f} s",
    )


def _in_medians(gap: float, before: list[float]) -> str:
    return f"{1000 * gap:.1f} ms = {gap / median(before):.2f}x"


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
