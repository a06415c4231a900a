"""`make bench`: speed beside CTranslate2, Hugging Face and Optimum on the same weights; the live tree on real text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from beamline.serving.models.repository import newest, scan
from tests.benchmarks import shape, shortlists
from tests.benchmarks.environments import python_of
from tests.benchmarks.live_tree import print_live_tree
from tests.benchmarks.made import ROOT
from tests.benchmarks.measure import (
    BEAMLINE,
    BEAMLINE_INT8,
    CASES,
    FLOAT32,
    INT8,
    OPTIMUM,
    QUICK_CASES,
    SHORTLIST_CASES,
    TRANSFORMERS,
    measure,
)
from tests.benchmarks.prose import english_sentences
from tests.benchmarks.report import print_report
from tests.benchmarks.roofline import print_roofline
from tests.benchmarks.workers import Worker


def main() -> None:
    options = _arguments()
    if options.only in (None, "speed"):
        _speed(options)
    if options.only in (None, "shortlist"):
        _shortlist(options)
    if options.only in (None, "tree"):
        _tree(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, two rounds")
    parser.add_argument("--rounds", type=int, help="5, or 2 with --quick")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default: 2)")
    parser.add_argument("--only", choices=("speed", "shortlist", "tree"), help="one part of the benchmark")
    parser.add_argument("--patience", type=float, default=2, help="seconds to wait for a quiet moment (default: 2)")
    parser.add_argument("--no-transformers", action="store_true", help="leave Hugging Face out, which is slow")
    parser.add_argument("--no-optimum", action="store_true", help="leave Optimum out")
    parser.add_argument("--model", type=Path, help="a converted version, for the live tree (default: the newest en-de)")
    parser.add_argument("--text", type=Path, help="its sentences, one a line (default: Python's documentation)")
    parser.add_argument("--lines", type=int, default=200, help="how many of them (default: 200)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where the models are kept")
    return parser.parse_args()


def _speed(options: argparse.Namespace) -> None:
    cache, threads = options.cache.resolve(), options.threads
    python = python_of("ctranslate2")
    models = shape.for_beamline(cache), shape.for_beamline_in_int8(cache), shape.for_ctranslate2(cache, python)
    with ExitStack() as stack:
        workers = _workers(stack, *models, python, threads)
        workers += [stack.enter_context(worker) for worker in _slowest(cache, options)]
        found = measure(workers, QUICK_CASES if options.quick else CASES, _rounds(options), options.patience)
        print_report(workers, found, threads)
    print_roofline({BEAMLINE: models[0], BEAMLINE_INT8: models[1]}, found, threads)


def _slowest(cache: Path, options: argparse.Namespace) -> Iterator[Worker]:
    threads = options.threads
    if not options.no_transformers:
        python, arguments = python_of("transformers"), (shape.original(cache), threads)
        yield Worker(TRANSFORMERS, python, "transformers_worker", arguments, threads)
    if not options.no_optimum:
        python = python_of("optimum")
        yield Worker(OPTIMUM, python, "optimum_worker", (shape.for_optimum(cache, python), threads), threads)


def _shortlist(options: argparse.Namespace) -> None:
    """The same with vocabulary shortlists, against CTranslate2 with `vmap`."""
    cache, threads = options.cache.resolve(), options.threads
    python = python_of("ctranslate2")
    ours = shortlists.for_beamline(cache, shape.for_beamline(cache))
    in_int8 = shortlists.for_beamline(cache, shape.for_beamline_in_int8(cache))
    theirs = shortlists.for_ctranslate2(cache, shape.for_ctranslate2(cache, python))
    with ExitStack() as stack:
        workers = _workers(stack, ours, in_int8, theirs, python, threads)
        found = measure(workers, SHORTLIST_CASES, _rounds(options), options.patience)
        print_report(workers, found, threads, ", with shortlists (CTranslate2: vmap)")


def _rounds(options: argparse.Namespace) -> int:
    return int(options.rounds or (2 if options.quick else 5))


def _workers(
    stack: ExitStack, ours: Path, in_int8: Path, theirs: Path, python: Path | str, threads: int
) -> list[Worker]:
    def start(name: str, python: Path | str, module: str, *arguments: object) -> Worker:
        return stack.enter_context(Worker(name, python, module, arguments, threads))

    return [
        start(BEAMLINE, sys.executable, "beamline_worker", ours, threads),
        start(BEAMLINE_INT8, sys.executable, "beamline_worker", in_int8, threads),
        start(FLOAT32, python, "ctranslate2_worker", theirs, threads, "float32"),
        start(INT8, python, "ctranslate2_worker", theirs, threads, "int8"),
    ]


def _tree(options: argparse.Namespace) -> None:
    folder = options.model
    if folder is None:
        root = ROOT / "model_repo"
        versions = scan(root).models.get("en-de", ()) if root.is_dir() else ()
        if not versions:
            print("\nThe live tree: no model_repo/en-de here; name a converted version with --model.")
            return
        folder = newest(versions).folder
    if options.text:
        lines = [line for line in options.text.read_text(encoding="utf-8").splitlines() if line.strip()]
        lines = lines[: options.lines]
    else:
        lines = english_sentences(options.lines)
    print_live_tree(folder, lines, options.threads)


if __name__ == "__main__":
    main()
