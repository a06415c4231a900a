"""What was measured, as text."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.measure import BEAMLINE, FLOAT32, INT8, TRANSFORMERS, Measured
from tests.benchmarks.shape import SOURCE_LENGTH, TARGET_LENGTH
from tests.benchmarks.workers import Worker

_IDLE = 0.05  # of a core; more than this while waiting disturbs the others


def print_report(workers: Sequence[Worker], found: Sequence[Measured], threads: int) -> None:
    rounds = min((len(measured.answers[BEAMLINE]) for measured in found), default=0)
    print(
        f"\nMarian-base shape, float32, random weights, {SOURCE_LENGTH} source and {TARGET_LENGTH} target tokens;"
        f" {threads} threads on {_cpu()} ({os.cpu_count()} cores); best of {rounds} interleaved rounds"
    )
    for worker in workers:
        print(f"  {worker.name}: {worker.version}")
    print("\nMilliseconds for the whole batch, encoder included. A ratio below 1 means that we are faster.\n")
    header = ("batch x beam", "ours ms", "tokens/s", "ms/step", "host", FLOAT32, INT8, TRANSFORMERS, "/ CT2", "/ HF")
    print_table([header, *(_row(measured) for measured in found)])
    print("\nhost: the share of our time that is not spent inside the encoder or the step graph.")
    print("Spread of our rounds, slowest / best: " + ", ".join(_spread(measured) for measured in found))
    print("CPU taken by others during the best runs, ours and theirs: " + ", ".join(map(_foreign, found)))
    print("Identical to ours, of all sentences: " + ", ".join(_identical(found, w) for w in workers[1:]))
    print("Resident memory in MB, at most: " + ", ".join(_memory(found, worker) for worker in workers))
    for worker in workers:
        if worker.idle_share > _IDLE:
            print(
                f"NOTE: {worker.name} used {worker.idle_share:.0%} of a core while it waited; it disturbed the others"
            )


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _row(measured: Measured) -> tuple[str, ...]:
    ours = measured.best(BEAMLINE)
    assert ours is not None
    peers = [measured.seconds(system) for system in (FLOAT32, INT8, TRANSFORMERS)]
    rivals = [seconds for seconds in peers[:2] if seconds is not None]
    inside = ours.details["encode_seconds"] + ours.details["decode_seconds"]
    return (
        str(measured.case),
        f"{1000 * ours.seconds:.0f}",
        f"{sum(map(len, ours.tokens)) / ours.seconds:.0f}",
        f"{1000 * ours.details['decode_seconds'] / ours.details['steps']:.1f}",
        f"{1 - inside / ours.seconds:.1%}",
        *("-" if seconds is None else f"{1000 * seconds:.0f}" for seconds in peers),
        _ratio(ours.seconds, min(rivals, default=None)),
        _ratio(ours.seconds, peers[2]),
    )


def _ratio(ours: float, theirs: float | None) -> str:
    return "-" if theirs is None else f"{ours / theirs:.2f}"


def _spread(measured: Measured) -> str:
    seconds = [answer.seconds for answer in measured.answers[BEAMLINE]]
    return f"{measured.case}: {max(seconds) / min(seconds):.2f}"


def _foreign(measured: Measured) -> str:
    best = [measured.best(system) for system in measured.answers]
    return f"{measured.case}: " + "/".join(f"{answer.foreign:.0%}" for answer in best if answer is not None)


def _identical(found: Sequence[Measured], worker: Worker) -> str:
    counts = [measured.identical(worker.name) for measured in found]
    same, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return f"{worker.name} {same / max(1, total):.1%} ({same} of {total})"


def _memory(found: Sequence[Measured], worker: Worker) -> str:
    sizes = (answer.rss_mb for measured in found for answer in measured.answers.get(worker.name, ()))
    most = max(sizes, default=0.0)
    return f"{worker.name} {most:.0f}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
