"""What was measured, as text."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.measure import BEAMLINE, BEAMLINE_INT8, FLOAT32, INT8, OPTIMUM, TRANSFORMERS, Measured
from tests.benchmarks.shape import SOURCE_LENGTH, TARGET_LENGTH
from tests.benchmarks.table import print_table
from tests.benchmarks.workers import Answer, Worker

_PEERS = (FLOAT32, INT8, TRANSFORMERS, OPTIMUM)
_IDLE = 0.05  # of a core; more than this while waiting disturbs the others


def print_report(workers: Sequence[Worker], found: Sequence[Measured], threads: int, words: str = "") -> None:
    """`words`: which of the vocabulary's are computed, where not all of them are."""
    rounds = min((len(measured.answers[BEAMLINE]) for measured in found), default=0)
    print(
        f"\nMarian-base shape, random weights, {SOURCE_LENGTH} source and {TARGET_LENGTH} target tokens{words};"
        f" {threads} threads on {_cpu()} ({os.cpu_count()} cores); best of {rounds} interleaved rounds"
    )
    for worker in workers:
        print(f"  {worker.name}: {worker.version}")
    print(
        "\nMilliseconds for the whole batch, encoder included. A ratio below 1 means that we are faster;"
        " CT2 is the better of its two.\n"
    )
    header = ("batch x beam", *_columns(BEAMLINE), *_columns(BEAMLINE_INT8), *_PEERS)
    ratios = ("ours / CT2", "int8 / CT2", "ours / HF", "int8 / HF", "ours / Optimum", "int8 / Optimum")
    print_table([header + ratios, *(_row(measured) for measured in found)])
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


def _columns(system: str) -> tuple[str, ...]:
    return (system, "tokens/s", "ms/step", "host")


def _row(measured: Measured) -> tuple[str, ...]:
    ours, in_int8 = measured.seconds(BEAMLINE), measured.seconds(BEAMLINE_INT8)
    peers = [measured.seconds(system) for system in _PEERS]
    rival = min((seconds for seconds in peers[:2] if seconds is not None), default=None)
    return (
        str(measured.case),
        *_own_cells(measured.best(BEAMLINE)),
        *_own_cells(measured.best(BEAMLINE_INT8)),
        *("-" if seconds is None else f"{1000 * seconds:.0f}" for seconds in peers),
        *(_ratio(mine, theirs) for theirs in (rival, *peers[2:]) for mine in (ours, in_int8)),
    )


def _own_cells(best: Answer | None) -> tuple[str, ...]:
    if best is None:
        return ("-",) * 4
    inside = best.details["encode_seconds"] + best.details["decode_seconds"]
    return (
        f"{1000 * best.seconds:.0f}",
        f"{sum(map(len, best.tokens)) / best.seconds:.0f}",
        f"{1000 * best.details['decode_seconds'] / best.details['steps']:.1f}",
        f"{1 - inside / best.seconds:.1%}",
    )


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"


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
