"""`python -m tests.benchmarks.in_process --source test.en [--reference test.de]`: `beamline.load` beside CTranslate2.

Both in a process of their own, with the same cores, and both from text to text: the shipped en-de as it is shipped
(8 bits, its serving.toml), and its checkpoint in CTranslate2, float32 and int8, whose `translate_batch` gets all lines
at once and sorts them itself; once with all threads for one batch (intra), once with a batch for each thread (inter).
They take turns, a round each, so that what the machine does meanwhile happens to all. Printed are lines a second (the
best round and the median), the ratio to CTranslate2's best, the CPU time of a line, which says more than the clock on a
machine that is not idle, and BLEU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from tests.benchmarks import shape
from tests.benchmarks.environments import python_of
from tests.benchmarks.online import CHECKPOINT, REFERENCES
from tests.benchmarks.table import print_table
from tests.support.processes import ROOT

OURS = "ours int8"
PEERS = {
    f"{name}, {how}": (compute_type, how) for name, compute_type in REFERENCES.items() for how in ("intra", "inter")
}


class Worker:
    """A process that translates all lines whenever it is told to, and says how long that took."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def round(self) -> tuple[float, float]:
        """Seconds by the clock, and of the CPU."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        clock, cpu = map(float, self._process.stdout.readline().split())
        return clock, cpu


@contextmanager
def worker(*command: str | Path) -> Iterator[Worker]:
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.in_process", description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, help="for BLEU")
    parser.add_argument("--lines", type=int, default=1000, help="the first so many (%(default)s)")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=0, help="of ours; 0: as it is loaded by default")
    parser.add_argument("--rounds", type=int, default=5, help="of each, in turn (%(default)s)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where CTranslate2's model is kept")
    options = parser.parse_args()
    lines = options.source.read_text(encoding="utf-8").splitlines()[: options.lines]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PEERS, OURS)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source = Path(folder) / "source.txt"
        source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        outputs = {name: Path(folder) / f"{number}.txt" for number, name in enumerate(seconds)}
        workers = {name: stack.enter_context(_worker(name, source, outputs[name], options)) for name in seconds}
        for each in workers.values():  # the first is to get warm
            each.round()
        for _ in range(options.rounds):
            for name, each in workers.items():
                seconds[name].append(each.round())
        answers = {name: path.read_text(encoding="utf-8").splitlines() for name, path in outputs.items()}
    references = None
    if options.reference is not None:
        references = options.reference.read_text(encoding="utf-8").splitlines()[: options.lines]
    _report(lines, seconds, answers, references, options)


def _worker(name: str, source: Path, out: Path, options: argparse.Namespace) -> AbstractContextManager[Worker]:
    common = (source, out, str(options.beam), str(options.threads))
    if name == OURS:
        model = ROOT / "model_repo" / "en-de"
        return worker(
            sys.executable, "-m", "tests.benchmarks.peers.beamline_rounds", model, *common, str(options.slots)
        )
    python = python_of("ctranslate2")
    model = shape.reference_for_ctranslate2(options.cache, CHECKPOINT, python)
    pieces = CHECKPOINT / "spm.model"
    return worker(python, "-m", "tests.benchmarks.peers.ctranslate2_rounds", model, *common, pieces, *PEERS[name])


def _report(
    lines: list[str],
    seconds: dict[str, list[tuple[float, float]]],
    answers: dict[str, list[str]],
    references: list[str] | None,
    options: argparse.Namespace,
) -> None:
    best = {name: min(clock for clock, _ in rounds) for name, rounds in seconds.items()}
    median = {name: statistics.median(clock for clock, _ in rounds) for name, rounds in seconds.items()}
    cpu = {name: 1000 * min(cpu for _, cpu in rounds) / len(lines) for name, rounds in seconds.items()}
    rival, typical = (min(found[name] for name in PEERS) for found in (best, median))
    rows = [("", "lines/s, best", "median", "/ best CT2", "by medians", "CPU ms/line", "BLEU")]
    for name in seconds:
        bleu = "-"
        if references is not None:
            import sacrebleu

            bleu = f"{sacrebleu.corpus_bleu(answers[name], [references]).score:.2f}"
        rates = (f"{len(lines) / best[name]:.1f}", f"{len(lines) / median[name]:.1f}")
        ratios = (f"{rival / best[name]:.2f}x", f"{typical / median[name]:.2f}x")
        rows.append((name, *rates, *ratios, f"{cpu[name]:.2f}", bleu))
    print(f"\nen-de, {len(lines)} lines, beam {options.beam}, {options.threads} threads, {options.rounds} rounds")
    print(f"{_cpu()}\n")
    print_table(rows)


def _cpu() -> str:
    try:
        found = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))
        ]
    except OSError:
        return "an unknown CPU"
    name = next((line.partition(":")[2].strip() for line in found if line.startswith("model name")), "an unknown CPU")
    vnni = any("vnni" in line for line in found)
    return f"{name} ({'with' if vnni else 'without'} VNNI)"


if __name__ == "__main__":
    main()
